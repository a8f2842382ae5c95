"""What every system plans for: a workload on a cluster for a model, with a source of costs."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from engine import units
from engine.cluster import Cluster
from engine.communication.travel import (
    Stops,
    places_of,
    rows_by_chance,
    rows_of_tokens,
    serving_gpus,
    touched_by_chance,
)
from engine.costs import CostModel
from engine.errors import InputError
from engine.goal import Goal, goal_of
from engine.model import MoEModel
from engine.network import Network
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Execution, Placement, Plan, Travel
from engine.training import TrainingStep
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload

LATEST = "_latest_traffic"
"""Where a problem keeps the placement that it was last asked for the traffic of, and that traffic and chosen copies."""

MEMORY_SHARE = 0.9
"""Part of a GPU's memory that expert weights may take; the rest is for activations, buffers and the runtime."""
MOST_CELLS = 2**26
"""Places of an expert on a GPU in a layer, of which half a gigabyte holds one number each: 94 layers of 512 experts on 1024
GPUs fit."""
MOST_SLOTS = 2**20
"""Of a GPU and a layer that are counted."""


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
) -> "Problem":
    """The problem of these inputs. Raises InputError when they do not fit each other.

    second: recording and model that share the cluster; others, in_use, step, graph, travel: see `Problem`.

    A traffic matrix knows no model: each column stands for what sits on one GPU, so the model takes its numbers of
    layers and experts from the matrix, and the matrix its bytes per token from the model.
    """
    travel = None if travel == Travel() else travel
    partner = None if second is None else make_problem(second[0], cluster, second[1], cost, travel=travel)
    if isinstance(workload, TrafficMatrix):
        workload = replace(workload, bytes_per_token=model.bytes_per_token)
        sizes = {"layers": workload.layers, "dense_layers": (), "experts": workload.num_experts}
        sizes["experts_per_token"] = min(model.experts_per_token, workload.num_experts)
        model = model.model_copy(update=sizes)
    return Problem(workload, cluster, model, cost, partner, others, in_use, step, graph, travel)


@dataclass(frozen=True, eq=False)
class Problem:
    """Checked on construction: raises InputError when its parts do not fit each other.

    second: another model on the same GPUs, with its own recording (Aurora §6, §7)
    others: further recordings of the model that a robust plan must also serve
    in_use: the placement that is deployed now; None: experts in contiguous blocks
    step: what to plan is a training step, not inference
    token_gpus: the GPU on which the tokens of each rank start, an entry a rank, where a plan moves them; None: on their rank
    graph: the step's operators where they are known better than from the model (an import); None: those of a transformer
    runs_attention: whether attention runs beside the MoE layers; in a launch it does not
    travel: how tokens are to travel under new plans; None: one row per token copy. A plan keeps its own
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
            ("experts per layer", self.workload.num_experts, second.workload.num_experts),
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
            self.travel,
        )

    def as_planned(self, plan: Plan) -> "Problem":
        """The problem with every model's tokens where the plan has them start; itself where the plan says nothing of it."""
        if plan.token_gpus == self.token_gpus:
            return self
        second = self.second and replace(self.second, token_gpus=plan.token_gpus_b)
        return replace(self, token_gpus=plan.token_gpus, second=second)

    @cached_property
    def demand(self) -> np.ndarray:
        """float64[layer, rank, expert]: token copies from every source rank for every expert."""
        demand = self.workload.demand(len(self.cluster.gpus))
        if self.token_gpus is None:
            return demand
        moved = np.zeros_like(demand)
        np.add.at(moved, (slice(None), list(self.token_gpus)), demand)
        return moved

    @property
    def gpu_of_token(self) -> np.ndarray:
        """int64[token] of a routing trace: the GPU on which it starts."""
        rank = self.workload.rank_of_token(len(self.cluster.gpus))
        return rank if self.token_gpus is None else np.array(self.token_gpus)[rank]

    @cached_property
    def tokens_of_rank(self) -> np.ndarray:
        """float64[layer, rank]: tokens (not copies) that every rank holds."""
        return self.demand.sum(axis=2) / self.model.experts_per_token

    @property
    def cost_source(self) -> str:
        """Where its times come from, for people, and whether what is asked was never measured."""
        return self.source_of_times(None)

    def source_of_times(self, travel: Travel | None) -> str:
        """The same of a plan whose tokens travel like this."""
        parts = [self.cost.source, self.cost.beyond(self.cluster)]
        if self.network.measured is None:
            parts.append(self.cluster.reached_in_words)
        if travel is not None:
            estimated = " (rows estimated from loads)" if self.estimates_rows(travel) else ""
            parts.append(travel.in_words + estimated)
        return "; ".join(part for part in parts if part)

    @cached_property
    def network(self) -> Network:
        return self.cost.network(self.cluster)

    def traffic(self, placement: Placement, travel: Travel | None = None) -> np.ndarray:
        """float64[layer, src, dst], read-only: bytes of the dispatch all-to-all; the diagonal is what stays. Combine is its
        transpose (Aurora §2.2), in the number format of its own. With `node` travel every hop is an entry, see
        `engine.communication.travel`; of a recording without tokens rows are an estimate, see `engine.communication.travel`.
        travel: None: one row per token copy, as plain all-to-all implementations send them."""
        # Simulation, bound and metrics of a plan all ask for it, at 320 GPUs for 48 MB and 0.1 s; so that of the last
        # placement is kept.
        travel, known = travel or Travel(), self._known(placement)
        if travel not in known:
            traffic = self._rows(placement, travel)
            traffic *= travel.row_bytes(self.model)[0]
            traffic.flags.writeable = False
            known[travel] = traffic
        return known[travel]

    def _known(self, placement: Placement) -> dict[Travel | str, np.ndarray]:
        """What is kept of a placement: traffic by how tokens travel, and chosen copies by what gets one row of a token."""
        latest, known = vars(self).get(LATEST, (None, {}))
        if latest is not placement:
            vars(self)[LATEST] = placement, (known := {})
        return known

    def chooses_copies(self, placement: Placement, travel: Travel | None) -> bool:
        """Whether tokens choose between copies of an expert by where they have to go; in turn each serves an equal share."""
        chooses = travel is not None and travel.replicas is not None and not placement.single
        return chooses and isinstance(self.workload, RoutingTrace)

    def hosts(self, placement: Placement, travel: Travel) -> np.ndarray:
        """int32[layer, token, k], of a routing trace: the GPU that serves every choice of a token, -1 = none."""
        known, source, experts = self._known(placement), self.gpu_of_token, self.workload.experts
        chooses = self.chooses_copies(placement, travel)
        if chooses and travel.unit in known:
            return known[travel.unit]
        hosts = np.empty(experts.transpose(1, 0, 2).shape, dtype=np.int32)
        for layer, of_layer in enumerate(hosts):
            of_layer[:] = serving_gpus(placement, layer, experts[:, layer], travel, source, self.stops)
        if chooses:  # which takes longer than to go round
            known[travel.unit] = hosts
        return hosts

    def served(self, placement: Placement, travel: Travel | None) -> np.ndarray:
        """float64[layer, expert, gpu]: token copies that every GPU serves of every expert."""
        if not self.chooses_copies(placement, travel):
            return self.demand.sum(axis=1)[:, :, None] * placement.share
        served = np.zeros(placement.share.shape)
        for layer, hosts in enumerate(self.hosts(placement, travel)):
            real = hosts >= 0
            np.add.at(served[layer], (self.workload.experts[:, layer][real], hosts[real]), 1.0)
        return served

    def copies_moved(self, placement: Placement, travel: Travel | None) -> np.ndarray:
        """float64[layer, src, dst] bytes if every copy of a token travelled on its own to the GPU that serves it; the diagonal
        is what stays."""
        if not self.chooses_copies(placement, travel):
            return self.traffic(placement)
        source, hosts = self.gpu_of_token, self.hosts(placement, travel)
        rows = np.array([rows_of_tokens(of_layer, source, self.stops, "copies") for of_layer in hosts])
        return rows * self.model.bytes_per_token

    def _rows(self, placement: Placement, travel: Travel) -> np.ndarray:
        """float64[layer, src, dst]"""
        unit = travel.unit
        if unit == "copies":
            return self.demand @ placement.share
        if isinstance(self.workload, RoutingTrace):
            source = self.gpu_of_token
            return np.array(
                [rows_of_tokens(hosts, source, self.stops, unit) for hosts in self.hosts(placement, travel)]
            )
        share = places_of(placement.share, self.stops) if unit == "node" else placement.share
        k, tokens = self.model.experts_per_token, self.tokens_of_rank
        if isinstance(self.workload, ExpertLoad):  # every source sends alike
            touched = touched_by_chance(self.workload.load, k, share)[:, None]
            touched = np.broadcast_to(touched, (*tokens.shape, touched.shape[2]))
        else:
            touched = (touched_by_chance(self.demand[layer], k, share[layer]) for layer in range(self.workload.layers))
        return np.array([rows_by_chance(*layer, self.stops, unit) for layer in zip(touched, tokens, strict=True)])

    def estimates_rows(self, travel: Travel | None) -> bool:
        """Whether the rows that are sent are an estimate: there are no tokens that share them."""
        return travel is not None and travel.unit != "copies" and not isinstance(self.workload, RoutingTrace)

    @cached_property
    def stops(self) -> Stops:
        """Where rows enter the nodes of the cluster as it is drawn."""
        return Stops(Network.of(self.cluster).domain)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != LATEST}

    def expert_slots_of_gpu(self) -> np.ndarray:
        """int64[gpu]: experts per layer that fit each GPU's memory when all layers hold as many."""
        per_slot = self.model.bytes_per_expert * self.workload.layers
        # More slots than anybody has experts are as good as so many, and no more than an integer can be.
        return np.minimum(self.cluster.values("memory") * MEMORY_SHARE // per_slot, MOST_SLOTS).astype(np.int64)

    def check_plan(self, plan: Plan) -> None:
        """Raise InputError unless the plan is for as many GPUs, layers and experts, and its experts fit the memory."""
        self._check_placement(plan.placement, f"the plan {plan.name}")
        if plan.goal is not self.goal:
            raise InputError(f"the plan {plan.name} is for {_another_goal(plan.goal, self.goal)}")
        if self.second is not None:
            self.second._check_placement(plan.placement_b, f"the plan {plan.name}")
        self.check_memory(plan.placement, plan.placement_b, plan.execution)

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

    @cached_property
    def context_bytes(self) -> float:
        """Bytes of the keys and values of all tokens that have an expert anywhere, of a routing trace."""
        real = (self.workload.experts >= 0).any(axis=(1, 2)) if isinstance(self.workload, RoutingTrace) else np.zeros(0)
        return float(real.sum()) * self.model.context_bytes_per_token

    def check_memory(
        self, placement: Placement, placement_b: Placement | None = None, execution: Execution = "vanilla"
    ) -> None:
        """Raise InputError when the experts of a GPU, and with context-coherent execution the contexts of all tokens, do not
        fit its memory."""
        held = self.held_bytes(placement, placement_b)
        room = self.cluster.values("memory") * MEMORY_SHARE
        contexts = self.context_bytes if execution == "context-coherent" else 0.0
        gpu = int((room - held).argmin())
        if held[gpu] <= room[gpu] < held[gpu] + contexts:
            raise InputError(
                f"{self.cluster.gpu_names[gpu]} would hold {contexts / 1e9:.3g} GB of keys and values of all "
                f"{self.workload.tokens:,} tokens, as context-coherent execution has every GPU do, beside "
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
    """What a plan is for where something else is open, and what to do."""
    match of_plan, of_problem:
        case Goal.TWO_MODELS, Goal.INFERENCE:
            return "two models, but only one is open; open the second too"
        case Goal.INFERENCE, Goal.TWO_MODELS:
            return "one model, but two are open; close the second"
    return f"{of_plan}, but what is open is {of_problem}; change the goal"
