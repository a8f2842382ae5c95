"""Lina's two-phase scheduling at inference, simulated over a recording batch by batch (sections 5.2, 6.2 and 7.3), with its
figures.

Every layer is gate → dispatch → expert FFN → combine → aggregate with a barrier after each step, as in `inference`,
but its hosting of experts may change from batch to batch:

* Phase one makes the hosting of a layer from the estimate for it, while the layer before is at work after its gate
  (and during the part without experts that follows). Its scheduling and its swapping-in of weights are hidden as far
  as that lasts; only the rest is waited for.
* Phase two, after the gate, compares the most popular experts. If they are as predicted all devices wait for the check
  only. Otherwise a hosting is made from the actual choices, and they wait for the scheduler (its measured time
  has the check in it) and for the weights that are on no device yet that needs them.

Every device keeps the weights of its experts of the linear placement; all others come from host memory when a hosting
asks for them, over a link of the device's own, and are forgotten after the layer. A token's path is of its first choices,
the likeliest if the recorder kept the router's order; it is sent to as many as `choices`.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from engine.errors import InputError, StoppedError
from engine.model import MoEModel
from engine.placement.devices.search import Hosting, check_slots
from engine.problem import Problem
from engine.result import Advance, Stop, never, unwatched
from engine.simulate.flows import all_to_all
from engine.simulate.scheduler import Scheduler, TwoPhaseOptions, device_slots, with_reaction
from engine.simulate.work import ranks_of_gpu
from engine.workload import RoutingTrace

SCHEMES = ("ideal", "baseline", "static", "lina", "without_estimation", "without_fine_tuning")
"""ideal: every device gets an equal part of every layer, and nothing is scheduled
baseline: experts stay in place, in contiguous blocks
static: hosted by their popularity in the profile, and left so
lina: both phases
without_estimation: scheduled from the actual choices at every layer, while all devices wait
without_fine_tuning: the first phase only"""

TAIL = 95


@dataclass(frozen=True, eq=False)
class SchemeSeconds:
    """One scheme, float64[batch, layer] seconds each.

    layer: the MoE layer from gate to aggregation, waiting for the scheduler included
    all_to_all: dispatch and combine
    waiting: for the scheduler and for expert weights
    """

    layer: np.ndarray
    all_to_all: np.ndarray
    waiting: np.ndarray


@dataclass(frozen=True)
class Figures:
    """Medians and 95th percentiles of one scheme as multiples of the same figure of the ideal.

    inference: the whole batch
    layer, all_to_all: the layers that Lina schedules, all batches together
    waiting: mean seconds per batch spent waiting for the scheduler
    """

    median_inference: float
    tail_inference: float
    median_layer: float
    tail_layer: float
    median_all_to_all: float
    tail_all_to_all: float
    waiting: float


@dataclass(frozen=True, eq=False)
class TwoPhaseResult:
    """The simulated schemes by name (see SCHEMES), and the quality of the estimation, with entries of False in layers before
    `options.path_length`.

    fine_tuned: bool[batch, layer], True if the second phase of Lina made a new hosting
    same_set, same_order: bool[batch, layer], True if the `check_experts` most popular experts were predicted, in any order or
        in theirs
    wrong_rank: int64[batch, layer], number of experts that the estimate puts at another rank of popularity
    hostings: of Lina, by batch and layer
    """

    options: TwoPhaseOptions
    cost_source: str
    schemes: dict[str, SchemeSeconds]
    fine_tuned: np.ndarray
    same_set: np.ndarray
    same_order: np.ndarray
    wrong_rank: np.ndarray
    hostings: tuple[tuple[Hosting, ...], ...] = ()

    @property
    def batches(self) -> int:
        return self.fine_tuned.shape[0]

    @property
    def first_layer(self) -> int:
        """The first layer that Lina schedules."""
        return self.options.path_length

    def inference_seconds(self, scheme: str) -> np.ndarray:
        """float64[batch]: seconds of a whole batch."""
        layers = self.schemes[scheme].layer
        return layers.sum(axis=1) + layers.shape[1] * self.options.other_seconds

    def figures(self, scheme: str) -> Figures:
        """The scheme's figures over the ideal's (1 where both are 0)."""
        mine, ideal = self.schemes[scheme], self.schemes["ideal"]
        pairs = [(self.inference_seconds(scheme), self.inference_seconds("ideal"))]
        pairs += [
            (getattr(mine, part)[:, self.first_layer :], getattr(ideal, part)[:, self.first_layer :])
            for part in ("layer", "all_to_all")
        ]
        ratios = [_ratio(np.percentile(a, q), np.percentile(b, q)) for a, b in pairs for q in (50, TAIL)]
        return Figures(*ratios, waiting=float(mine.waiting.sum(axis=1).mean()))

    @property
    def fine_tuning_rate(self) -> float:
        """Share of the scheduled layers of all batches that were scheduled again."""
        return float(self.fine_tuned[:, self.first_layer :].mean())

    def accuracy_of_layer(self, check: Literal["set", "order"] = "set") -> np.ndarray:
        """float64[layer]: share of batches with a right estimate, as the check has it; nan in layers without one."""
        right = (self.same_set if check == "set" else self.same_order).mean(axis=0)
        right[: self.first_layer] = np.nan
        return right

    def accuracy(self, check: Literal["set", "order"] = "set") -> float:
        """Share of right estimates over all scheduled layers and batches."""
        return float(self.accuracy_of_layer(check)[self.first_layer :].mean())


def _ratio(mine: float, other: float) -> float:
    if other > 0:
        return float(mine / other)
    return 1.0 if mine == other else float("inf")


def two_phase(
    problem: Problem,
    profile: RoutingTrace,
    options: TwoPhaseOptions | None = None,
    stop: Stop = never,
    advance: Advance = unwatched,
) -> TwoPhaseResult:
    """Simulate all schemes on the recording of `problem`, with estimates learnt from `profile`.

    Tokens start on the ranks of `RoutingTrace.rank_of_token`, applied to each batch on its own. When `stop` answers
    True the batches done so far are returned; raises StoppedError when there are none.
    Raises InputError when the problem has no routing trace, when the two recordings differ in layers or experts, when
    the recording is shorter than a batch or the path too long for its layers, and when the experts do not fit.

    advance: called with the share done
    """
    options = options or TwoPhaseOptions()
    options = replace(options, max_experts_per_device=device_slots(problem, options.max_experts_per_device))
    options = with_reaction(problem, options)
    trace = _checked_trace(problem, profile, options)
    scheduler = Scheduler(options, profile, len(problem.cluster.gpus))
    machine = _Machine(problem, scheduler)
    machine.host(replace(profile, experts=profile.experts[:, :, : options.choices]).load)
    batches = trace.tokens // options.batch_tokens
    seconds = {scheme: np.zeros((3, batches, trace.layers)) for scheme in SCHEMES}
    tuned, same_set, same_order = np.zeros((3, batches, trace.layers), dtype=bool)
    wrong_rank = np.zeros((batches, trace.layers), dtype=np.int64)
    hostings: list[list[Hosting]] = [[] for _ in range(batches)]

    def result_of_batches(done: int) -> TwoPhaseResult:
        if not done:
            raise StoppedError("stopped before a batch was simulated")
        schemes = {scheme: SchemeSeconds(*parts[:, :done]) for scheme, parts in seconds.items()}
        judged = (table[:done] for table in (tuned, same_set, same_order, wrong_rank))
        return TwoPhaseResult(options, problem.cost_source, schemes, *judged, tuple(map(tuple, hostings[:done])))

    for batch, layer in product(range(batches), range(trace.layers)):
        if stop():
            return result_of_batches(batch)
        advance((batch + layer / trace.layers) / batches)
        if layer == 0:
            chosen = slice(batch * options.batch_tokens, (batch + 1) * options.batch_tokens)
            experts = trace.experts[chosen, :, 0].astype(np.int64)
            part = replace(trace.part(chosen), experts=trace.experts[chosen, :, : options.choices])
            demand = part.demand(len(problem.cluster.gpus)) * options.copies
            window = dict.fromkeys(SCHEMES, 0.0)
        here = demand[layer]
        load = here.sum(axis=0)
        estimate = None
        if layer >= options.path_length:
            estimate, at = scheduler.estimate([scheduler.expected(experts, layer)], len(experts)), (batch, layer)
            same_set[at], same_order[at], wrong_rank[at] = scheduler.compared(estimate, load)
            tuned[at] = scheduler.off(estimate, load)
        seed = options.seed + batch * trace.layers + layer
        waits = machine.hostings(layer, load, estimate, bool(tuned[batch, layer]), window, seed)
        hostings[batch].append(waits["lina"][0])
        for scheme, (hosting, waiting) in waits.items():
            steps = machine.steps(here, hosting)
            seconds[scheme][:, batch, layer] = sum(steps.values()) + waiting, steps["all_to_all"], waiting
            window[scheme] = sum(steps.values()) - steps["gate"] + options.other_seconds
    return result_of_batches(batches)


def _checked_trace(problem: Problem, profile: RoutingTrace, options: TwoPhaseOptions) -> RoutingTrace:
    """The recording of `problem`; raises InputError where it cannot be simulated with this profile and these options."""
    trace = problem.workload
    if not isinstance(trace, RoutingTrace):
        raise InputError(f"{trace.name}: two-phase scheduling follows tokens from layer to layer; it needs a routing log")
    if (trace.layers, trace.num_experts) != (profile.layers, profile.num_experts):
        raise InputError(
            f"{profile.name} has {profile.layers} layers of {profile.num_experts} experts, {trace.name} {trace.layers} "
            f"of {trace.num_experts}; profile a recording of the same model"
        )
    if trace.tokens < options.batch_tokens:
        raise InputError(
            f"{trace.name} has {trace.tokens} tokens, fewer than the {options.batch_tokens} of one batch; make batches smaller"
        )
    if options.top_k > trace.num_experts:
        raise InputError(f"top_k: {options.top_k}; wanted at most the number of experts, {trace.num_experts}")
    if options.choices > trace.k:
        raise InputError(f"choices: {options.choices}; {trace.name} has {trace.k} for each token")
    check_slots(trace.num_experts, len(problem.cluster.gpus), options.max_experts_per_device)
    return trace


class _Machine:
    """The devices: the seconds of a layer under a hosting, and the hosting and the waiting of each scheme."""

    def __init__(self, problem: Problem, scheduler: Scheduler) -> None:
        self.scheduler, self.options = scheduler, (options := scheduler.options)
        self.cost, self.network = problem.cost, problem.network
        self.model: MoEModel = problem.model.model_copy(update={"experts_per_token": options.choices})
        self.devices, self.experts = len(problem.cluster.gpus), problem.workload.num_experts
        self.kinds = ranks_of_gpu(problem.cluster.gpus)

    def host(self, load: np.ndarray) -> None:
        """Host every layer by a popularity float64[layer, expert], once."""
        self.hosted = [self.scheduler.hosting(popularity, self.options.seed + layer) for layer, popularity in enumerate(load)]

    def hostings(
        self, layer: int, load: np.ndarray, estimate: np.ndarray | None, fine_tune: bool, window: dict[str, float], seed: int
    ) -> dict[str, tuple[Hosting | None, float]]:
        """By scheme, the hosting of a layer (None: the ideal's) and the seconds that all devices wait for it.

        load: float64[expert], the actual choices
        estimate: float64[expert], None: there is none yet
        window: seconds during which the layer before hides phase one
        """
        options = self.options
        by_choice = self.scheduler.hosting(load, seed)
        answers: dict[str, tuple[Hosting | None, float]] = {
            "ideal": (None, 0.0),
            "baseline": (self.scheduler.kept, 0.0),
            "static": (self.hosted[layer], 0.0),
            "without_estimation": (by_choice, options.schedule_seconds + self._swap(by_choice)),
        }
        if estimate is None:
            start = self.hosted[layer] if options.start == "popularity" else self.scheduler.kept
            return answers | {"lina": (start, 0.0), "without_fine_tuning": (start, 0.0)}
        predicted = self.scheduler.hosting(estimate, seed, options.renormalise)
        phase_one = options.schedule_seconds + self._swap(predicted)
        exposed = {scheme: max(0.0, phase_one - window[scheme]) for scheme in ("lina", "without_fine_tuning")}
        answers["without_fine_tuning"] = (predicted, exposed["without_fine_tuning"])
        if fine_tune:
            again = options.schedule_seconds + self._swap(by_choice, predicted)
            answers["lina"] = (by_choice, exposed["lina"] + again)
        else:
            answers["lina"] = (predicted, exposed["lina"] + options.check_seconds)
        return answers

    def steps(self, demand: np.ndarray, hosting: Hosting | None) -> dict[str, float]:
        """Seconds of the steps of a layer, of both all-to-alls together.

        demand: float64[rank, expert] tokens
        hosting: None: the ideal's
        """
        if hosting is None:
            # As many experts on each device as in the linear placement, and all experts equally popular.
            share = np.full((self.experts, self.devices), 1.0 / self.devices)
            tokens = np.full((self.devices, -(-self.experts // self.devices)), demand.sum())
            tokens /= tokens.size
        else:
            share = np.zeros((self.experts, self.devices))
            for device, experts in enumerate(hosting):
                share[list(experts), device] = 1.0
            share /= share.sum(axis=1, keepdims=True)
            tokens = share.T * demand.sum(axis=0)
        held = demand.sum(axis=1) / self.options.choices
        gate, ffn, aggregate = np.zeros((3, self.devices))
        for gpu, devices in self.kinds.items():
            gate[devices] = self.cost.gate(gpu, held[devices], self.model)
            ffn[devices] = self.cost.expert_ffn(gpu, tokens[devices], self.model).sum(axis=1)
            aggregate[devices] = self.cost.aggregate(gpu, held[devices], self.model)
        traffic = demand @ share * self.model.bytes_per_token
        compute = {"gate": gate, "ffn": ffn, "aggregate": aggregate}
        steps = {kind: float(self.cost.together(step).max()) for kind, step in compute.items()}
        return steps | {"all_to_all": self._network(traffic) + self._network(traffic.T)}

    def _network(self, traffic: np.ndarray) -> float:
        if self.options.network == "bound":
            return self.network.bound(traffic)
        return all_to_all("concurrent", None, traffic, self.network).seconds

    def _swap(self, hosting: Hosting, already: Hosting | None = None) -> float:
        """Seconds until every device has the weights of its experts, if it has those of the hosting `already` too."""
        missing = max(len(self.scheduler.missing(device, hosting, already)) for device in range(self.devices))
        return missing * self.model.bytes_per_expert / self.options.host_bandwidth
