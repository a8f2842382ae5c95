"""A plan with as many slots on every GPU in every layer, as serving engines need it, and what that costs."""

from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.goal import Goal
from engine.placement.even_slots import even_slots
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem
from engine.simulate.metrics import Metrics, metrics
from engine.systems.eplb import speed_of_gpu


@dataclass(frozen=True)
class EvenProjection:
    """plan: with the even placement; slots: on every GPU; added, dropped: copies of experts that are new and given up, over all
    layers; before, after: figures of both placements when the GPUs send all at once, as engines do."""

    plan: Plan
    slots: int
    added: int
    dropped: int
    before: Metrics
    after: Metrics


def project_evenly(plan: Plan, problem: Problem) -> EvenProjection:
    """The nearest even plan, see `engine.placement.even_slots`: with the fewest slots that hold as many copies as the plan's
    fullest layer, or as many as the smallest memory holds. Raises InputError for training steps and two models, and where
    the memory does not hold every expert."""
    if plan.goal is not Goal.INFERENCE:
        raise InputError(f"the plan {plan.name} is for {plan.goal}; only plans for one model's inference are projected")
    now = plan.placement
    slots = _slots_of_each(now, problem)
    held = now.share > 0
    even = even_slots(held, problem.workload.load, speed_of_gpu(problem), slots)
    rows = tuple(
        tuple(_in_order(row[gpu], layer[:, gpu]) for gpu in range(now.gpus))
        for row, layer in zip(now.experts_of_gpu, even, strict=True)
    )
    placement = now.model_copy(update={"experts_of_gpu": rows})
    parts = {"send_order": SendOrder(mode="concurrent"), "reaction": None, "claim": None}
    if not placement.single:
        parts["execution"] = "vanilla"
    before = plan.with_parts(**parts)
    after = plan.with_parts(**parts, placement=placement, parent=plan.id, name=f"{plan.name[:110]}, even")
    return EvenProjection(
        after,
        slots,
        int((even & ~held).sum()),
        int(now.slots.sum() - (even & held).sum()),
        metrics(before, problem),
        metrics(after, problem),
    )


def _slots_of_each(placement: Placement, problem: Problem) -> int:
    """Slots of every GPU in every layer."""
    most = int(np.minimum(problem.expert_slots_of_gpu(), placement.experts).min())
    least, wanted = (
        -(-copies // placement.gpus) for copies in (placement.experts, int(placement.slots.sum(axis=1).max()))
    )
    if most < least:
        tight = problem.cluster.gpu_names[int(problem.expert_slots_of_gpu().argmin())]
        raise InputError(
            f"an even plan needs {least} experts per layer on every GPU, but {tight} has memory for {most}; leave it out of "
            "the cluster, or use a smaller dtype"
        )
    return min(wanted, most)


def _in_order(before: tuple[int, ...], held: np.ndarray) -> tuple[int, ...]:
    """The experts of a GPU, bool[expert], first those it had, in the order of their slots."""
    kept = [expert for expert in dict.fromkeys(before) if held[expert]]
    return (*kept, *sorted(set(np.flatnonzero(held).tolist()).difference(kept)))
