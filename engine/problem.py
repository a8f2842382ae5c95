"""The input of every system: a workload on a cluster for a model, with a source of costs."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from engine import units
from engine.cluster import MEMORY_SHARE, Cluster
from engine.communication.travel import Stops
from engine.costs import CostModel
from engine.errors import InputError
from engine.goal import Goal, goal_of
from engine.model import MoEModel
from engine.network import Network
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Execution, Offload, Placement, Plan, Travel
from engine.result import Floats, Stop
from engine.serving.step import ServingStep
from engine.training import TrainingStep
from engine.workload import MixedTraffic, RoutingTrace, TrafficMatrix, Workload

MOST_CELLS = 2**26
"""Limit of layers × experts × GPUs: half a gigabyte at one number each. 94 layers of 512 experts on 1024 GPUs fit."""
MOST_SLOTS = 2**20
"""Limit of the expert slots that are counted for a GPU and a layer."""


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
    travel: Travel | None = None,
    serving_step: ServingStep | None = None,
    judged_by: "WholeStep | None" = None,
) -> "Problem":
    """The problem of these inputs. Raises InputError when they do not fit each other.

    second: recording and model that share the cluster
    others, in_use, step, graph, travel, serving_step, judged_by: see `Problem`

    A traffic matrix takes its bytes per token from the model, see `model_for`.
    """
    travel = None if travel in (None, Travel()) else travel.on_nodes(cluster.node_sizes)
    partner = None if second is None else make_problem(second[0], cluster, second[1], cost, travel=travel)
    if isinstance(workload, TrafficMatrix):
        workload, model = replace(workload, bytes_per_token=model.bytes_per_token), model_for(workload, model)
    own = {"travel": travel, "serving_step": serving_step, "judged_by": judged_by}
    return Problem(workload, cluster, model, cost, partner, others, in_use, step, graph, **own)


def model_for(workload: Workload, model: MoEModel) -> MoEModel:
    """The model as a workload has it. A traffic matrix knows no model: each column stands for the experts of one GPU. So the
    model takes its numbers of layers and experts from the matrix."""
    if not isinstance(workload, TrafficMatrix):
        return model
    sizes = {"layers": workload.layers, "dense_layers": (), "experts": workload.num_experts}
    sizes["experts_per_token"] = min(model.experts_per_token, workload.num_experts)
    return model.model_copy(update=sizes)


class WholeStep(Protocol):
    """A step of serving with its operators outside the MoE layers, such as `engine.simulate.serving.Serving`."""

    def seconds(self, plan: Plan, problem: "Problem", stop: Stop) -> float:
        """Seconds of the step under a plan. Raises InputError if it cannot be served."""

    def bytes_beside(self, problem: "Problem") -> Floats:
        """float64[gpu]: bytes besides experts."""


@dataclass(frozen=True, eq=False)
class Problem:
    """The inputs of a plan, checked on construction: raises InputError when they do not fit each other.

    second: another model on the same GPUs, with its own recording (Aurora §6, §7)
    others: further recordings of the model that a robust plan must also serve
    in_use: the placement in production; None: experts in contiguous blocks
    step: the training step to plan; None: inference
    graph: the step's operators where they are known better than from the model (an import); None: those of a transformer
    travel: how tokens travel under new plans; None: one row per token copy. A plan keeps its own
    serving_step: the step whose tokens the recording was brought to; None: it is as it was recorded
    judged_by: the step by which a system that simulates several plans chooses; None: by the pass
    token_gpus: the GPU on which the tokens of each rank start, for plans that move them; None: on their rank
    runs_attention: True if attention runs between the MoE layers, as everywhere but in a launch
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
    travel: Travel | None = None
    serving_step: ServingStep | None = None
    judged_by: WholeStep | None = None
    token_gpus: tuple[int, ...] | None = None
    runs_attention: bool = True

    def __post_init__(self) -> None:
        for recording in (self.workload, *self.others):
            self.model.check_recording(recording.layers, recording.num_experts, recording.k, recording.name)
        cells = self.workload.layers * self.workload.num_experts * len(self.cluster.gpus)
        if cells > MOST_CELLS:
            raise InputError(
                f"{self.workload.layers:,} layers of {self.workload.num_experts:,} experts on {len(self.cluster.gpus):,} GPUs "
                f"make {cells:,} places, which take more memory than there may be (at most {MOST_CELLS:,}); plan for fewer "
                "layers or GPUs"
            )
        self.demand  # noqa: B018  raises when the recorded ranks do not fit the cluster
        if self.second is not None:
            self._check_second(self.second)
        if self.step is not None and self.second is not None:
            raise InputError("a training step is planned for one model; close the second model")
        if self.step is not None and self.travel is not None:
            raise InputError("in a training step every copy of a token travels on its own; leave --travel out")
        if self.graph is not None and self.step is None:
            raise InputError("an operator graph belongs to a training step; describe the step too")
        if self.in_use is not None:
            self._check_placement(self.in_use, "the placement in use")

    @cached_property
    def goal(self) -> Goal:
        """The goal of planning, told by the inputs."""
        return goal_of(training=self.step is not None, two_models=self.second is not None)

    def _check_second(self, second: "Problem") -> None:
        for noun, mine, theirs in (
            ("experts per layer", self.workload.num_experts, second.workload.num_experts),
            ("MoE layers", self.workload.layers, second.workload.layers),
        ):
            if mine != theirs:
                raise InputError(
                    f"{self.workload.name} has {mine} {noun}, {second.workload.name} has {theirs}: two models share a "
                    f"cluster expert beside expert, layer beside layer; choose a second model with {mine} {noun}"
                )

    def with_workload(self, workload: Workload) -> "Problem":
        """The same problem with another recording of the model. Raises InputError when it does not fit."""
        second = self.second and (self.second.workload, self.second.model)
        shared = self.cluster, self.model, self.cost
        kept = {name: getattr(self, name) for name in ("in_use", "step", "graph", "travel", "serving_step", "judged_by")}
        return make_problem(workload, *shared, second, **kept)

    def as_planned(self, plan: Plan) -> "Problem":
        """The problem with the tokens of every model on the GPUs where the plan has them start."""
        if plan.token_gpus == self.token_gpus:
            return self
        second = self.second and replace(self.second, token_gpus=plan.token_gpus_b)
        return replace(self, token_gpus=plan.token_gpus, second=second)

    @cached_property
    def demand(self) -> np.ndarray:
        """float64[layer, rank, expert]: token copies from each source rank to each expert."""
        demand = self.workload.demand(len(self.cluster.gpus))
        if self.token_gpus is None:
            return demand
        moved = np.zeros_like(demand)
        np.add.at(moved, (slice(None), list(self.token_gpus)), demand)
        return moved

    @property
    def gpu_of_token(self) -> np.ndarray:
        """int64[token]: the GPU on which each token of a routing trace starts."""
        rank = self.workload.rank_of_token(len(self.cluster.gpus))
        return rank if self.token_gpus is None else np.array(self.token_gpus)[rank]

    @cached_property
    def tokens_of_rank(self) -> np.ndarray:
        """float64[layer, rank]: tokens (not copies) of each rank."""
        return self.demand.sum(axis=2) / self.model.experts_per_token

    @property
    def cost_source(self) -> str:
        """Source of the times, for people, with a note if it never measured anything like this cluster."""
        return self.source_of_times(None)

    def source_of_times(self, travel: Travel | None) -> str:
        """`cost_source` for a plan with this travel."""
        parts = [self.cost.source, self.cost.beyond(self.cluster)]
        if self.network.measured is None:
            parts.append(self.cluster.reached_in_words)
        if travel is not None:
            estimated = " (rows estimated from loads)" if self.estimates_rows(travel) else ""
            parts.append(travel.in_words + estimated)
        return "; ".join(part for part in parts if part)

    def estimates_rows(self, travel: Travel | None) -> bool:
        """True if the rows that are sent are an estimate, because no tokens were recorded that share them."""
        return travel is not None and travel.unit != "copies" and not isinstance(self.workload, RoutingTrace | MixedTraffic)

    @cached_property
    def network(self) -> Network:
        return self.cost.network(self.cluster)

    @cached_property
    def stops(self) -> Stops:
        """Entry GPUs of the nodes of the cluster as it is drawn."""
        return Stops(Network.of(self.cluster).domain)

    def expert_slots_of_gpu(self) -> np.ndarray:
        """int64[gpu]: experts per layer that fit each GPU's memory if all layers hold as many."""
        per_slot = self.model.bytes_per_expert * self.workload.layers
        # The limit, more than any model has experts, keeps the quotient within an integer.
        return np.minimum(self.cluster.values("memory") * MEMORY_SHARE // per_slot, MOST_SLOTS).astype(np.int64)

    def check_plan(self, plan: Plan) -> None:
        """Raise InputError unless the plan is for as many GPUs, layers and experts, and its experts fit the memory."""
        self._check_placement(plan.placement, f"the plan {plan.name}")
        if plan.goal is not self.goal:
            raise InputError(f"the plan {plan.name} is for {_another_goal(plan.goal, self.goal)}")
        if self.second is not None:
            self.second._check_placement(plan.placement_b, f"the plan {plan.name}")
        self.check_memory(plan.placement, plan.placement_b, plan.execution, plan.offload)

    def _check_placement(self, placement: Placement, name: str) -> None:
        sizes = (placement.gpus, placement.layers, placement.experts)
        layers, gpus, experts = self.demand.shape
        for noun, mine, theirs in zip(("GPUs", "MoE layers", "experts"), (gpus, layers, experts), sizes, strict=True):
            if mine != theirs:
                raise InputError(f"{name} is for {theirs} {noun}, but there are {mine}")

    def held_bytes(
        self, placement: Placement, placement_b: Placement | None = None, offload: Offload | None = None
    ) -> np.ndarray:
        """float64[gpu]: bytes of expert weights, those of the second model included; of those in the host's memory only the
        ones that pass through."""
        slots = placement.slots
        kept = slots.sum(axis=0) if offload is None else offload.staying(slots) + offload.passing(slots)
        held = kept * self.model.bytes_per_expert
        if placement_b is not None:
            held = held + placement_b.slots.sum(axis=0) * self.second.model.bytes_per_expert
        return held

    @cached_property
    def context_bytes(self) -> float:
        """Bytes of the keys and values of a trace's tokens, in a step of decode of their whole sequences; tokens without any
        expert do not count."""
        real = (self.workload.experts >= 0).any(axis=(1, 2)) if isinstance(self.workload, RoutingTrace) else np.zeros(0)
        return float(real.sum()) * self.tokens_kept * self.model.context_bytes_per_token

    @property
    def tokens_kept(self) -> int:
        """Tokens with keys and values for every token of a pass: in a step of decode those of its sequence."""
        decodes = self.serving_step is not None and self.serving_step.phase == "decode"
        return self.serving_step.longest if decodes else 1

    def check_memory(
        self,
        placement: Placement,
        placement_b: Placement | None = None,
        execution: Execution = "vanilla",
        offload: Offload | None = None,
    ) -> None:
        """Raise InputError if a GPU's experts do not fit its memory, with the contexts of all tokens in context-coherent
        execution."""
        held = self.held_bytes(placement, placement_b, offload)
        room = self.cluster.values("memory") * MEMORY_SHARE
        contexts = self.context_bytes if execution == "context-coherent" else 0.0
        gpu = int((room - held).argmin())
        if held[gpu] <= room[gpu] < held[gpu] + contexts:
            raise InputError(
                f"{self.cluster.gpu_names[gpu]} would hold {contexts / 1e9:.3g} GB of keys and values of all "
                f"{self.workload.tokens * self.tokens_kept:,} tokens, as context-coherent execution has every GPU do, beside "
                f"{held[gpu] / 1e9:.3g} GB of expert weights, but only {room[gpu] / 1e9:.3g} GB ({units.share(MEMORY_SHARE)} "
                "of its memory) can be used; plan with execution=vanilla, fewer tokens or more memory"
            )
        if np.any(held > room):
            gpu = int((held / room).argmax())
            raise InputError(
                f"{self.cluster.gpu_names[gpu]} would hold {held[gpu] / 1e9:.3g} GB of expert weights, but only "
                f"{room[gpu] / 1e9:.3g} GB ({units.share(MEMORY_SHARE)} of its memory) can be used; add GPUs, use GPUs with "
                "more memory or a smaller dtype"
            )


def _another_goal(of_plan: Goal, of_problem: Goal) -> str:
    """End of the message about a plan for another goal than the problem's: its goal and the remedy."""
    match of_plan, of_problem:
        case Goal.TWO_MODELS, Goal.INFERENCE:
            return "two models, but only one is open; open the second too"
        case Goal.INFERENCE, Goal.TWO_MODELS:
            return "one model, but two are open; close the second"
    return f"{of_plan}, but what is open is {of_problem}; change the goal"
