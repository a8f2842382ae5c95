"""Plans whose scheduler hosts experts anew for every batch (Lina §5.2), before a launch: the batch that all plans replay, the
tokens that the scheduler has learnt from, and a line of the pre-flight check on each.

A pass is one batch: tokens of the recording's second half, in its order. The scheduler knows the first half, as in the
simulation of its plan. Where no scheduler can run, the plan's placement stays as it is, and a line says why.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.goal import Goal
from engine.launch.preparation.launch import Check
from engine.placement.devices.search import check_slots
from engine.plan import Plan
from engine.workload import RoutingTrace, Workload


@dataclass(frozen=True, eq=False)
class Schedulers:
    """The schedulers of a launch's plans.

    plans: as folded onto the ranks, with a reaction only where a scheduler runs
    refused: of every plan the reason why its scheduler does not run; empty if it does, None if it has none
    batch: that all plans replay, None if no scheduler runs
    profile: tokens that the schedulers have learnt from, likewise
    """

    plans: tuple[Plan, ...]
    refused: tuple[str | None, ...]
    batch: RoutingTrace | None = None
    profile: RoutingTrace | None = None

    @classmethod
    def of(cls, plans: Sequence[Plan], workload: Workload) -> "Schedulers":
        """plans: folded onto the ranks; workload: of the (first) model"""
        halves = None
        if isinstance(workload, RoutingTrace) and any(plan.reaction is not None for plan in plans):
            halves = workload.halves()
        refused = [None if plan.reaction is None else _refusal(plan, halves and halves[0]) for plan in plans]
        left = tuple(plan.with_parts(reaction=None) if why else plan for plan, why in zip(plans, refused, strict=True))
        batches = [plan.reaction.batch for plan in left if plan.reaction is not None]
        if not batches:
            return cls(left, tuple(refused))
        profile, served = halves
        return cls(left, tuple(refused), served.part(np.arange(min(served.tokens, *batches))), profile)

    def checks(self, tokens: int) -> Iterator[Check]:
        """A line on every plan with a scheduler. tokens: of a pass"""
        for plan, why in zip(self.plans, self.refused, strict=True):
            if why:
                text = f"that of {plan.name} does not run, its placement stays as it is: {why}"
            elif why is not None:
                first, last = plan.reaction.path_length, plan.placement.layers - 1
                text = (
                    f"of {plan.name}: a pass is a batch of {tokens:,} tokens of the recording's second half; it has learnt "
                    f"from the {self.profile.tokens:,} of the first. MoE layers {first} to {last} are hosted anew in every "
                    f"pass, at most {plan.reaction.max_experts_per_device} experts on a rank, out of host memory"
                )
            else:
                continue
            yield Check("Scheduler", True, text)


def _refusal(plan: Plan, profile: RoutingTrace | None) -> str:
    """The reason why a plan's scheduler does not run, empty if it does. profile: tokens to learn from"""
    reaction, placement = plan.reaction, plan.placement
    if plan.goal is not Goal.INFERENCE or plan.execution != "vanilla":
        other = {Goal.TRAINING: "a training step", Goal.TWO_MODELS: "two models on the same ranks"}
        return f"it is for one model at inference, not for {other.get(plan.goal, 'tokens that stay with their experts')}"
    if reaction.batch is None:
        return "the plan counts as its own placement (made with scheduler=true it counts with its scheduler)"
    if profile is None:
        return "it follows tokens from layer to layer; it needs a routing log"
    if placement.layers <= reaction.path_length:
        return f"{placement.layers} MoE layers are too few for a path of {reaction.path_length}"
    if reaction.top_k > placement.experts:
        return f"it keeps {reaction.top_k} next experts, of {placement.experts}"
    if not (profile.experts >= 0).any(axis=(0, 2)).all():
        return "in some layer no token of the recording's first half has an expert, so that there is nothing to learn from"
    try:
        check_slots(placement.experts, placement.gpus, reaction.max_experts_per_device)
    except InputError as error:
        return str(error)
    return ""
