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
from math import log2
from typing import Literal

import numpy as np

from engine.errors import InputError, StoppedError
from engine.model import MoEModel
from engine.placement.baselines import linear_assignment
from engine.placement.devices.kernel import DevicesInstance, replicate_devices
from engine.placement.devices.search import Hosting, check_slots, pack_devices
from engine.placement.popularity import PathProfile, most_popular, profile_paths
from engine.problem import Problem
from engine.result import Advance, Limits, Stop, never, unwatched
from engine.simulate.flows import all_to_all
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
PAPER_SLOTS = 4
"""Limit of experts on one device in a layer in the paper (§7.1), with one expert for every device."""
PAPER_SCHEDULE, PAPER_CHECK = 6.2e-3, 1.45e-3
"""Seconds to schedule and to check as the paper measured them on its testbed (§7.3.1), Python and PyTorch included."""
HOST_BANDWIDTH = 25e9
"""Bytes/s between host memory and a device over a link of its own, assumed: PCIe 4.0 x16 less its overheads."""
HOST_START_UP = 10e-6
"""Seconds until a copy between a device and its host begins, assumed."""
HOST_STEP = 10e-9
"""Seconds of a step of the scheduler on a processor, assumed: a comparison of the sort, or a look at a device."""


@dataclass(frozen=True)
class TwoPhaseOptions:
    """Settings of Lina's scheduler and of the machine it runs on. Raises InputError for values that make no sense.

    path_length, top_k, max_experts_per_device: Lina's, with the paper's defaults (sections 5.2 and 7.1). The first
        layer with a schedule of its own is number `path_length`, counted from 0. max_experts_per_device 0: see `device_slots`
    batch_tokens: recorded tokens in a batch, in the order of the recording; an incomplete last batch is left out
    copies: tokens of the batch for each recorded token, to reach a batch as large as a service has
    schedule_seconds: time of the scheduler to make a hosting and make it known; None: what it takes on the problem's cluster,
        see `reaction_seconds`
    check_seconds: its time to find that none is needed; likewise
    choices: experts that a token is sent to, the first of its recorded ones
    host_bandwidth: bytes/s from host memory to each device, over which expert weights are swapped in
    other_seconds: the part of a layer without experts (attention and the like), which every scheme has and which hides
        the first phase too
    check, check_experts: phase two compares that many of the most popular experts, as a set or also in their order.
        The paper compares the first 2 · k, k being `choices`, and does not say which of the two it means
    start: hosting of the layers before `path_length`, which have no estimate: "blocks", as in the paper, or "popularity", that
        of the profile, as a plan holds it
    packing: "lina" (equation 1, first-fit decreasing) or "best" (the largest load least, see `replicate_devices`)
    renormalise: True if the truncated estimates are scaled to 1 before equation 1. To the letter they are not, and
        then the devices of the missing part stay idle or nearly so
    network: an all-to-all takes as long as its busiest port ("bound"), or as sends that all start at once ("concurrent")
    """

    path_length: int = 3
    top_k: int = 1
    max_experts_per_device: int = 0
    batch_tokens: int = 2048
    copies: float = 1.0
    schedule_seconds: float | None = None
    check_seconds: float | None = None
    host_bandwidth: float = HOST_BANDWIDTH
    other_seconds: float = 0.0
    check: Literal["set", "order"] = "set"
    check_experts: int = 2
    choices: int = 1
    start: Literal["blocks", "popularity"] = "blocks"
    packing: Literal["lina", "best"] = "lina"
    renormalise: bool = True
    network: Literal["bound", "concurrent"] = "bound"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("path_length", "top_k", "batch_tokens", "check_experts", "choices"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)}; wanted at least 1")
        if self.max_experts_per_device < 0:
            raise InputError(f"max_experts_per_device: {self.max_experts_per_device}; wanted at least 0")
        for name in ("copies", "host_bandwidth"):
            if not 0 < getattr(self, name) < np.inf:
                raise InputError(f"{name}: {getattr(self, name)}; wanted a positive number")
        for name in ("schedule_seconds", "check_seconds", "other_seconds"):
            seconds = getattr(self, name)
            if not (seconds is None and name != "other_seconds") and not 0 <= seconds < np.inf:
                raise InputError(f"{name}: {seconds}; wanted seconds, at least 0")
        choices = {
            "check": ("set", "order"),
            "packing": ("lina", "best"),
            "start": ("blocks", "popularity"),
            "network": ("bound", "concurrent"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise InputError(f"{name}: '{getattr(self, name)}' is not one of {', '.join(known)}")


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
    trace, machine = _checked_trace(problem, profile, options), _Machine(problem, options)
    paths = _profile(profile, options)
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
            estimate = paths.estimate(experts[:, layer - options.path_length : layer], layer - 1, options.top_k)
            at = batch, layer
            same_set[at], same_order[at], wrong_rank[at] = _compare(estimate, load, options.check_experts)
            tuned[at] = not (same_set if options.check == "set" else same_order)[at]
        seed = options.seed + batch * trace.layers + layer
        waits = machine.hostings(layer, load, estimate, bool(tuned[batch, layer]), window, seed)
        hostings[batch].append(waits["lina"][0])
        for scheme, (hosting, waiting) in waits.items():
            steps = machine.steps(here, hosting)
            seconds[scheme][:, batch, layer] = sum(steps.values()) + waiting, steps["all_to_all"], waiting
            window[scheme] = sum(steps.values()) - steps["gate"] + options.other_seconds
    return result_of_batches(batches)


def reaction_seconds(problem: Problem, options: TwoPhaseOptions) -> tuple[float, float]:
    """Seconds to schedule a layer, check included, and to check alone, on the problem's cluster (§6.2).

    Every device counts its tokens' choices and sends the counts to device 0, whose host compares, and sorts the experts and
    looks for a device for each if it must; the answer goes back to all: a word, or the experts of every device.
    """
    devices, experts, network = len(problem.cluster.gpus), problem.workload.num_experts, problem.network
    slots = options.max_experts_per_device or device_slots(problem)
    counts, words = 8.0 * experts, 8.0 * options.choices * options.batch_tokens * options.copies / devices
    counted = max(float(problem.cost.memory_pass(gpu, words)) for gpu in set(problem.cluster.gpus))
    gather = np.zeros((devices, devices))
    gather[1:, 0] = counts
    looked = HOST_STEP * experts * log2(max(experts, 2))
    to_host = counted + network.bound(gather) + HOST_START_UP + devices * counts / options.host_bandwidth + looked

    def answered(size: float) -> float:
        there = np.zeros((devices, devices))
        there[0, 1:] = size
        return HOST_START_UP + devices * size / options.host_bandwidth + network.bound(there)

    return to_host + HOST_STEP * experts * devices + answered(4.0 * devices * slots), to_host + answered(8.0)


def with_reaction(problem: Problem, options: TwoPhaseOptions) -> TwoPhaseOptions:
    """The options with the seconds of the problem's cluster where none are given."""
    schedule, check = reaction_seconds(problem, options)
    given = options.schedule_seconds, options.check_seconds
    return replace(
        options,
        schedule_seconds=schedule if given[0] is None else given[0],
        check_seconds=check if given[1] is None else given[1],
    )


def _profile(profile: RoutingTrace, options: TwoPhaseOptions) -> PathProfile:
    """The experts that followed paths of first choices, all choices of the layer after a path counted alike."""
    first, length = profile.experts[:, :, 0], options.path_length
    if options.choices == 1:
        return profile_paths(first, profile.num_experts, length)
    layers = {}
    for end in range(length - 1, profile.layers - 1):
        after = profile.experts[:, end + 1, : options.choices].T
        rows = np.concatenate([np.column_stack([first[:, end + 1 - length : end + 1], choice]) for choice in after])
        layers[end] = profile_paths(rows, profile.num_experts, length).layers[length - 1]
    return PathProfile(length, profile.num_experts, layers)


def device_slots(problem: Problem, wanted: int = 0) -> int:
    """Experts that a device hosts in a layer, at most: as many as are wanted, or with 0 the paper's, or twice an even share if
    that is more; never more than the memory of the smallest device holds. Raises InputError where that is less than an even
    share."""
    experts, even_share = problem.workload.num_experts, -(-problem.workload.num_experts // len(problem.cluster.gpus))
    fits = problem.expert_slots_of_gpu()
    tight = int(fits.argmin())
    if fits[tight] < even_share:
        raise InputError(
            f"{experts} experts per layer do not fit: {problem.cluster.gpu_names[tight]} has memory for {fits[tight]} per "
            f"layer, all GPUs together for {fits.sum()}; add GPUs or memory, or use a smaller dtype"
        )
    return min(wanted or max(PAPER_SLOTS, 2 * even_share), int(fits[tight]))


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


def _compare(estimate: np.ndarray, load: np.ndarray, top: int) -> tuple[bool, bool, int]:
    """Quality of an estimate float64[expert] of the actual load float64[expert]: True if it has the `top` most popular experts
    right as a set, True if in order, and the number of all experts that it puts at another rank."""
    ranked, actual = most_popular(estimate, len(load)), most_popular(load, len(load))
    same_order = bool((ranked[:top] == actual[:top]).all())
    return set(ranked[:top]) == set(actual[:top]), same_order, int((ranked != actual).sum())


class _Machine:
    """The devices: the seconds of a layer under a hosting, and the hosting and the waiting of each scheme."""

    def __init__(self, problem: Problem, options: TwoPhaseOptions) -> None:
        self.options, self.cost, self.network = options, problem.cost, problem.network
        self.model: MoEModel = problem.model.model_copy(update={"experts_per_token": options.choices})
        self.devices, self.experts = len(problem.cluster.gpus), problem.workload.num_experts
        self.kinds = ranks_of_gpu(problem.cluster.gpus)
        held = self.experts // self.devices + (np.arange(self.devices) < self.experts % self.devices)
        home = linear_assignment(self.experts, held)
        self.linear: Hosting = tuple(tuple(np.flatnonzero(home == device).tolist()) for device in range(self.devices))

    def host(self, load: np.ndarray) -> None:
        """Host every layer by a popularity float64[layer, expert], once."""
        self.hosted = [self._plan(popularity, True, self.options.seed + layer) for layer, popularity in enumerate(load)]

    def hostings(
        self, layer: int, load: np.ndarray, estimate: np.ndarray | None, fine_tune: bool, window: dict[str, float], seed: int
    ) -> dict[str, tuple[Hosting | None, float]]:
        """By scheme, the hosting of a layer (None: the ideal's) and the seconds that all devices wait for it.

        load: float64[expert], the actual choices
        estimate: float64[expert], None: there is none yet
        window: seconds during which the layer before hides phase one
        """
        options = self.options
        by_choice = self._plan(load, True, seed)
        answers: dict[str, tuple[Hosting | None, float]] = {
            "ideal": (None, 0.0),
            "baseline": (self.linear, 0.0),
            "static": (self.hosted[layer], 0.0),
            "without_estimation": (by_choice, options.schedule_seconds + self._swap(by_choice)),
        }
        if estimate is None:
            start = self.hosted[layer] if options.start == "popularity" else self.linear
            return answers | {"lina": (start, 0.0), "without_fine_tuning": (start, 0.0)}
        predicted = self._plan(estimate, options.renormalise, seed)
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

    def _plan(self, popularity: np.ndarray, renormalise: bool, seed: int) -> Hosting:
        """The hosting for a popularity float64[expert]; estimates are at most 1 in all, counts are anything."""
        options, total = self.options, popularity.sum()
        share = popularity / total if renormalise and total > 0 else popularity
        if options.packing == "lina":
            return pack_devices(share * self.devices, self.devices, options.max_experts_per_device, seed)
        instance = DevicesInstance(share, self.devices, options.max_experts_per_device)
        return replicate_devices(instance, Limits(seed=seed, exact=False), kicks=0).solution

    def _swap(self, hosting: Hosting, already: Hosting | None = None) -> float:
        """Seconds until every device has the weights of its experts; its own of the linear placement are there, and
        those of the hosting `already` too."""
        missing = max(
            len(set(experts) - set(self.linear[device]) - set(already[device] if already else ()))
            for device, experts in enumerate(hosting)
        )
        return missing * self.model.bytes_per_expert / self.options.host_bandwidth
