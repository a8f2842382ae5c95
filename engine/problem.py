"""What every system plans for: a workload on a cluster for a model, with a source of costs."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from engine.cluster import Cluster
from engine.costs import CostModel
from engine.errors import InputError
from engine.goal import Goal, goal_of
from engine.model import MoEModel
from engine.network import Network
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Placement, Plan
from engine.training import TrainingStep
from engine.workload import TrafficMatrix, Workload

LATEST = "_latest_traffic"
"""Where a problem keeps the placement that it was last asked for the traffic of, and that traffic."""

MEMORY_SHARE = 0.9
"""Part of a GPU's memory that expert weights may take; the rest is for activations, buffers and the runtime."""


def make_problem(
    workload: Workload,
    cluster: Cluster,
    model: MoEModel,
    cost: CostModel,
    second: tuple[Workload, MoEModel] | None = None,
    others: tuple[Workload, ...] = (),
    in_use: Placement | None = None,
    step: TrainingStep | None = None,
    graph: OperatorGraph | None = None,
) -> "Problem":
    """The problem of these inputs. Raises InputError when they do not fit each other.

    second: recording and model that share the cluster; others, in_use, step, graph: see `Problem`.

    A traffic matrix knows no model: each column stands for what sits on one GPU, so the model takes its numbers of
    layers and experts from the matrix, and the matrix its bytes per token from the model.
    """
    partner = None if second is None else make_problem(second[0], cluster, second[1], cost)
    if isinstance(workload, TrafficMatrix):
        workload = replace(workload, bytes_per_token=model.bytes_per_token)
        sizes = {"layers": workload.layers, "dense_layers": (), "experts": workload.num_experts}
        sizes["experts_per_token"] = min(model.experts_per_token, workload.num_experts)
        model = model.model_copy(update=sizes)
    return Problem(workload, cluster, model, cost, partner, others, in_use, step, graph)


@dataclass(frozen=True, eq=False)
class Problem:
    """Checked on construction: raises InputError when its parts do not fit each other.

    second: another model on the same GPUs, with its own recording (Aurora §6, §7)
    others: further recordings of the model that a robust plan must also serve
    in_use: the placement that is deployed now; None: experts in contiguous blocks
    step: what to plan is a training step, not inference
    graph: the step's operators where they are known better than from the model (an import); None: those of a transformer
    """

    workload: Workload
    cluster: Cluster
    model: MoEModel
    cost: CostModel
    second: "Problem | None" = None
    others: tuple[Workload, ...] = ()
    in_use: Placement | None = None
    step: TrainingStep | None = None
    graph: OperatorGraph | None = None

    def __post_init__(self) -> None:
        for recording in (self.workload, *self.others):
            self.model.check_recording(recording.layers, recording.num_experts, recording.k, recording.name)
        self.demand  # noqa: B018  raises when the recorded ranks do not fit the cluster
        if self.second is not None:
            self._check_second(self.second)
        if self.step is not None and self.second is not None:
            raise InputError("a training step is planned for one model; close the second model")
        if self.graph is not None and self.step is None:
            raise InputError("an operator graph belongs to a training step; describe the step too")
        if self.in_use is not None:
            self._check_placement(self.in_use, "the placement in use")

    @property
    def goal(self) -> Goal:
        """What is planned for, as what is open says."""
        return goal_of(training=self.step is not None, two_models=self.second is not None)

    def _check_second(self, second: "Problem") -> None:
        for what, mine, theirs in (
            ("experts a layer", self.workload.num_experts, second.workload.num_experts),
            ("MoE layers", self.workload.layers, second.workload.layers),
        ):
            if mine != theirs:
                raise InputError(
                    f"{self.workload.name} has {mine} {what}, {second.workload.name} has {theirs}: two models share a "
                    f"cluster expert beside expert, layer beside layer; choose a second model with {mine} {what}"
                )

    def with_workload(self, workload: Workload) -> "Problem":
        """The same problem with another recording of the model. Raises InputError when it does not fit."""
        return make_problem(
            workload,
            self.cluster,
            self.model,
            self.cost,
            None if self.second is None else (self.second.workload, self.second.model),
            (),
            self.in_use,
            self.step,
            self.graph,
        )

    @cached_property
    def demand(self) -> np.ndarray:
        """float64[layer, rank, expert]: token copies from every source rank for every expert."""
        return self.workload.demand(len(self.cluster.gpus))

    @cached_property
    def tokens_of_rank(self) -> np.ndarray:
        """float64[layer, rank]: tokens (not copies) that every rank holds."""
        return self.demand.sum(axis=2) / self.model.experts_per_token

    @cached_property
    def network(self) -> Network:
        return self.cost.network(self.cluster)

    def traffic(self, placement: Placement) -> np.ndarray:
        """float64[layer, src, dst], read-only: bytes of the dispatch all-to-all; the diagonal is what stays. Combine is its
        transpose (Aurora §2.2). Every token copy is sent on its own, as plain all-to-all implementations do."""
        # Simulation, bound and metrics of a plan all ask for it, at 320 GPUs for 48 MB and 0.1 s; so the last is kept.
        latest, traffic = vars(self).get(LATEST, (None, None))
        if latest is not placement:
            vars(self).pop(LATEST, None)
            traffic = self.demand @ placement.share
            traffic *= self.model.bytes_per_token
            traffic.flags.writeable = False
            vars(self)[LATEST] = placement, traffic
        return traffic

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != LATEST}

    def expert_slots_of_gpu(self) -> np.ndarray:
        """int64[gpu]: experts per layer that fit each GPU's memory when all layers hold as many."""
        per_slot = self.model.bytes_per_expert * self.workload.layers
        return (self.cluster.values("memory") * MEMORY_SHARE // per_slot).astype(np.int64)

    def check_plan(self, plan: Plan) -> None:
        """Raise InputError unless the plan is for as many GPUs, layers and experts, and its experts fit the memory."""
        self._check_placement(plan.placement, f"the plan {plan.name}")
        if plan.goal is not self.goal:
            raise InputError(f"the plan {plan.name} is for {_another_goal(plan.goal, self.goal)}")
        if self.second is not None:
            self.second._check_placement(plan.placement_b, f"the plan {plan.name}")
        self.check_memory(plan.placement, plan.placement_b)

    def _check_placement(self, placement: Placement, whose: str) -> None:
        sizes = (placement.gpus, placement.layers, placement.experts)
        wanted = (len(self.cluster.gpus), self.workload.layers, self.workload.num_experts)
        for what, mine, theirs in zip(("GPUs", "MoE layers", "experts"), wanted, sizes, strict=True):
            if mine != theirs:
                raise InputError(f"{whose} is for {theirs} {what}, but there are {mine}")

    def held_bytes(self, placement: Placement, placement_b: Placement | None = None) -> np.ndarray:
        """float64[gpu]: bytes of expert weights, of both models where there are two."""
        held = placement.slots.sum(axis=0) * self.model.bytes_per_expert
        if placement_b is not None:
            held = held + placement_b.slots.sum(axis=0) * self.second.model.bytes_per_expert
        return held

    def check_memory(self, placement: Placement, placement_b: Placement | None = None) -> None:
        """Raise InputError when the experts of a GPU do not fit its memory."""
        held = self.held_bytes(placement, placement_b)
        room = self.cluster.values("memory") * MEMORY_SHARE
        if np.any(held > room):
            gpu = int((held / room).argmax())
            raise InputError(
                f"{self.cluster.gpu_names[gpu]} would hold {held[gpu] / 1e9:.3g} GB of expert weights, but only "
                f"{room[gpu] / 1e9:.3g} GB ({MEMORY_SHARE:.0%} of its memory) can be used; add GPUs, use GPUs with more "
                "memory or a smaller dtype"
            )


def _another_goal(of_plan: Goal, of_problem: Goal) -> str:
    """What a plan is for where something else is open, and what to do."""
    match of_plan, of_problem:
        case Goal.TWO_MODELS, Goal.INFERENCE:
            return "two models, but only one is open; open the second too"
        case Goal.INFERENCE, Goal.TWO_MODELS:
            return "one model, but two are open; close the second"
    return f"{of_plan}, but what is open is {of_problem}; change the goal"
