"""Experts on GPUs in every layer so that tokens seldom change GPU between layers, with a proven bound.

ExFlow sections IV-B to IV-D. Its equation 8 counts, over recorded tokens, the hops between layers that leave a GPU (or a
node) when every GPU holds equally many experts of each layer. That sum depends on the tokens only through the counts of
hops between experts of neighbouring layers, so the size of the problem does not grow with the recording. Three ways to
price a hop: flat (all hops alike), staged (the paper's: fewest hops between nodes first, then fewest between GPUs inside
each node) and joint (a price for each kind, minimised together, which two stages do not achieve).

Exact with one expert per GPU and one price, and on small instances; else local search with limits from spectra and
semidefinite relaxations. The first dispatch to layer 0 and the gathering at the end are outside the objective.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from engine.errors import InputError
from engine.placement.affinity import bounds
from engine.placement.affinity.exact import chain_optimum, chain_work, one_expert_per_gpu, printed_program
from engine.placement.affinity.moves import Prices, divide_anew
from engine.placement.affinity.search import greedy_chain, polish, search
from engine.placement.transitions import transitions as hops_of
from engine.result import Floats, Ints, Limits, Report, Result, Status, Stop, never, relative_gap, result_of, status_of

PROVEN_GAP = 1e-9
SPECTRA_SHARE = 0.5
"""Part of the time limit that the first bound may take."""
EXACT_WORK, EXACT_WORK_PER_SECOND = 2e10, 3e9
"""Multiplications up to which dynamic programming is tried at all, and how many of them a second of the limit allows."""
SEARCH_SHARE, BOUND_SHARE, SEARCH_CAP, BOUND_CAP = 0.4, 0.3, 0.6, 0.97
"""Work of each step as a part of the time limit by its own estimate, and when the clock ends it in any case."""

STAGES_SHARE = 0.75
"""Part of a joint search that goes into the two stages it starts from."""


@dataclass(frozen=True)
class AffinityInstance:
    """Hops between layers, and their costs.

    transitions: float64[layer - 1, expert, expert], hops from an expert of a layer to one of the next, at least 0
    gpus: a divisor of the number of experts
    gpus_per_node: GPU g is in node g // gpus_per_node; None = one node
    cost_gpu, cost_node: of a hop to another GPU of the node, and to another node; at least 0
    within: float64[layer, expert, expert] or None, hops between experts of one layer, which cost as much; only without nodes

    Raises InputError if a shape or a value is wrong.
    """

    transitions: Floats
    gpus: int
    gpus_per_node: int | None = None
    cost_gpu: float = 1.0
    cost_node: float = 1.0
    within: Floats | None = None

    def __post_init__(self) -> None:
        counts = np.ascontiguousarray(self.transitions, dtype=np.float64)
        object.__setattr__(self, "transitions", counts)
        if counts.ndim != 3 or counts.shape[1] != counts.shape[2] or counts.shape[1] == 0:
            raise InputError(f"transitions: shape {list(counts.shape)}; wanted [layers - 1, experts, experts]")
        if not np.isfinite(counts).all() or (counts.size and counts.min() < 0):
            raise InputError("transitions: every count must be finite and at least 0")
        if self.gpus < 1 or self.experts % self.gpus:
            divisors = [n for n in range(1, self.experts + 1) if self.experts % n == 0]
            raise InputError(
                f"gpus: {self.experts} experts cannot be spread equally over {self.gpus} GPUs; "
                f"possible are {', '.join(map(str, divisors))}"
            )
        if self.gpus_per_node is not None and (self.gpus_per_node < 1 or self.gpus % self.gpus_per_node):
            raise InputError(f"gpus_per_node: {self.gpus} GPUs are not whole nodes of {self.gpus_per_node}")
        if self.within is not None:
            if self.within.shape != (self.layers, self.experts, self.experts) or not (self.within >= 0).all():
                raise InputError("within: wanted counts of at least 0, [layers, experts, experts]")
            if self.nodes > 1:
                raise InputError("within: hops inside a layer are counted between GPUs only; leave gpus_per_node out")
        for name in ("cost_gpu", "cost_node"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name}: a hop must have a finite cost of at least 0, not {getattr(self, name):g}")

    @property
    def layers(self) -> int:
        return len(self.transitions) + 1

    @property
    def experts(self) -> int:
        return self.transitions.shape[1]

    @cached_property
    def pairs_within(self) -> Floats | None:
        """float64[layer, expert, expert]: `within` in both directions together, without hops that stay with their expert."""
        if self.within is None:
            return None
        both = self.within + self.within.transpose(0, 2, 1)
        return both * ~np.eye(self.experts, dtype=bool)

    @property
    def total(self) -> float:
        """All hops that a placement could make leave their GPU."""
        within = 0.0 if self.within is None else self.pairs_within.sum() / 2
        return float(self.transitions.sum() + within)

    @property
    def node_size(self) -> int:
        """GPUs of a node."""
        return self.gpus_per_node or self.gpus

    @property
    def nodes(self) -> int:
        return self.gpus // self.node_size

    def hops(self, gpu_of_expert: Ints) -> tuple[float, float]:
        """(hops to another node, hops to another GPU of the same node) of a placement int64[layer, expert]."""
        # Counted one by one: the difference of all and those that stay would lose small counts next to large ones.
        node_hops = gpu_hops = 0.0
        pairs = [(gpu_of_expert[layer], gpu_of_expert[layer + 1], count, 1.0) for layer, count in enumerate(self.transitions)]
        if self.within is not None:
            pairs += [(place, place, count, 0.5) for place, count in zip(gpu_of_expert, self.pairs_within, strict=True)]
        for here, there, count, part in pairs:
            leaves_node = here[:, None] // self.node_size != there // self.node_size
            leaves_gpu = here[:, None] != there
            node_hops += part * float(count[leaves_node].sum())
            gpu_hops += part * float(count[leaves_gpu & ~leaves_node].sum())
        return node_hops, gpu_hops

    def cost(self, gpu_of_expert: Ints) -> float:
        """Cost of all hops of a placement int64[layer, expert]."""
        node_hops, gpu_hops = self.hops(gpu_of_expert)
        return self.cost_node * node_hops + self.cost_gpu * gpu_hops

    def prices(self) -> Prices:
        """The savings of a kept hop; two kinds of hops that cost the same, or of which one cannot occur, are one."""
        if self.nodes == 1 or self.cost_gpu == self.cost_node:
            return Prices(self.transitions, self.gpus, self.gpus, self.cost_gpu, 0.0, self.pairs_within)
        if self.node_size == 1:
            return Prices(self.transitions, self.gpus, self.gpus, self.cost_node, 0.0)
        return Prices(self.transitions, self.gpus, self.node_size, self.cost_gpu, self.cost_node - self.cost_gpu)


def affinity(
    instance: AffinityInstance,
    limits: Limits = Limits(),
    stop: Stop = never,
    report: Report | None = None,
    *,
    staged: bool = False,
) -> Result[Ints]:
    """Experts on GPUs so that hops cost little; `solution` is gpu_of_expert int64[layer, expert], E / P on each GPU.

    limits: with exact=False, or too few seconds for better bounds, all of them go into the search and the bound is the fast
        spectral one
    staged: fewest hops between nodes first, then fewest between the GPUs of each node (ExFlow section IV-C); the objective
        is still the cost of all hops. Proven, its bound is that of plans made in stages, which a plan that weighs both kinds
        of hops together may undercut; unproven, the bound holds for plans made in any way. A stage whose hops cost nothing is
        a stage all the same. Otherwise the cost is minimised.

    Status OPTIMAL if proven (for `staged`: no plan with as few hops between nodes, the fewest possible, has fewer between
    GPUs), TIME_LIMIT if the clock ended a step, FEASIBLE if the work allotted was done, CANCELLED if `stop` answered True.
    """
    start = time.perf_counter()
    seconds, wall, seed = limits.seconds, limits.wall_seconds, limits.seed
    options = {"staged": staged, "time_limit": seconds, "exact": limits.exact}
    lexicographic = staged and instance.nodes > 1 and instance.node_size > 1
    prices = instance.prices()
    if staged and not lexicographic and prices.gpu == 0:  # the one stage that there is: its hops count, whatever they cost
        priced, tell = replace(instance, cost_gpu=1.0, cost_node=1.0), report and (lambda objective, bound: report(0.0, 0.0))
        fewest = affinity(priced, limits, stop, tell)
        return result_of("affinity", start, fewest.status, 0.0, 0.0, fewest.solution, options, seed)

    def answer(status: Status, place: Ints, bound: float) -> Result[Ints]:
        objective = instance.cost(place)
        return result_of("affinity", start, status, objective, min(bound, objective), place, options, seed)

    place = _exact(instance, prices, lexicographic, seconds, stop)
    if place is not None:
        result = answer(Status.OPTIMAL, place, math.inf)
        if report:
            report(result.objective, result.bound)
        return result

    loading = time.perf_counter()
    compile_ahead()
    start += time.perf_counter() - loading  # no part of the seconds
    fits = bounds.SECONDS_PER_SPECTRUM * instance.experts**3 <= SPECTRA_SHARE * seconds
    least = _Bound(instance, prices, stop, start + SPECTRA_SHARE * wall if fits else start)
    incumbent = _Incumbent(instance, least, lexicographic, report)
    tightens = limits.exact and least.can_tighten(BOUND_SHARE * seconds)
    share, cap = (SEARCH_SHARE, SEARCH_CAP) if tightens else (SEARCH_SHARE + BOUND_SHARE, BOUND_CAP)
    _search_from_starts(incumbent, prices, share * seconds, start, cap * wall, seed, stop)
    best = incumbent.place
    if tightens and relative_gap(instance.cost(best), least.cost()) > PROVEN_GAP:
        least.tighten(BOUND_SHARE * seconds, start + BOUND_CAP * wall, instance.cost(best), stop, incumbent.report)
    bound = least.cost()
    proven = not lexicographic and relative_gap(instance.cost(best), bound) <= PROVEN_GAP
    return answer(status_of(proven, stop, time.perf_counter() - start > BOUND_CAP * wall), best, bound)


def affinity_printed(instance: AffinityInstance, limits: Limits = Limits(), stop: Stop = never) -> Result[Ints]:
    """The paper's placement: its integer program for nodes, then for the GPUs of each; answers as `affinity` has them.

    The bound is the better of the program's own and the spectral one. Status OPTIMAL if one program decided all and proved its
    answer. Raises InputError for a program that is too large.
    """
    start = time.perf_counter()
    flat = instance.nodes == 1 or instance.node_size == 1
    groups = instance.gpus if flat else instance.nodes
    half = limits if flat else replace(limits, seconds=limits.seconds / 2)
    place, least, proven = printed_program(instance.transitions, groups, half, stop)
    if not flat:
        each = replace(half, seconds=half.seconds / groups)
        place = _within_nodes(instance, place, lambda inner, _: printed_program(inner, instance.node_size, each, stop)[0])
    fits = bounds.SECONDS_PER_SPECTRUM * instance.experts**3 <= SPECTRA_SHARE * limits.seconds
    until = time.perf_counter() + (SPECTRA_SHARE * limits.wall_seconds if fits else 0.0)
    price = instance.cost_gpu if instance.nodes == 1 else instance.cost_node
    bound = max(least * price, _Bound(instance, instance.prices(), stop, until).cost())
    objective, proven = instance.cost(place), proven and flat
    bound = objective if proven else min(bound, objective)
    options = {"printed": True, "time_limit": limits.seconds}
    status = status_of(proven, stop, not proven)
    return result_of("affinity-printed", start, status, objective, bound, place, options, limits.seed)


class _Incumbent:
    """The best placement so far, int64[layer, expert], and the bound; improvements of either are reported.

    lexicographic: every placement taken replaces the one before, since hops between nodes count before all others.
    """

    def __init__(self, instance: AffinityInstance, least: "_Bound", lexicographic: bool, on_progress: Report | None) -> None:
        self.instance, self.least, self.lexicographic = instance, least, lexicographic
        self.on_progress = on_progress
        self.place: Ints | None = None
        self.cost = math.inf

    def report(self, place: Ints | None = None) -> None:
        """Take `place` if it is better, and say how things stand."""
        if place is not None:
            cost = self.instance.cost(place)
            if self.place is None or self.lexicographic or cost < self.cost:
                self.place, self.cost = place, cost
        if self.on_progress and self.place is not None:
            self.on_progress(self.cost, min(self.least.cost(), self.cost))


def _search_from_starts(
    incumbent: _Incumbent, prices: Prices, seconds: float, start: float, most_seconds: float, seed: int, stop: Stop
) -> None:
    """Fill the incumbent: in stages where nodes count, else from a greedy chain, then by local search.

    seconds: work by its own estimate; most_seconds: wall time after `start` at which the clock ends it.
    """
    instance, least, lexicographic = incumbent.instance, incumbent.least, incumbent.lexicographic
    enough = math.inf if prices.node else prices.gpu * least.total - least.cost()
    deadline = start + most_seconds
    if instance.nodes > 1 and instance.node_size > 1 and (lexicographic or prices.node):
        part = 1.0 if lexicographic else STAGES_SHARE
        first = _in_stages(instance, part * seconds, start + part * most_seconds, seed, stop)
        incumbent.report(first)
        starts, seconds = [first], (1 - part) * seconds
    else:
        linear = np.arange(instance.experts) // (instance.experts // instance.gpus)
        starts = [greedy_chain(prices, 0, linear, stop=lambda: stop() or time.perf_counter() > deadline)]
    if not lexicographic:
        incumbent.report(starts[0])
        incumbent.report(search(prices, starts, seconds, deadline, seed, enough, stop, incumbent.report))


def _exact(instance: AffinityInstance, prices: Prices, lexicographic: bool, time_limit: float, stop: Stop) -> Ints | None:
    """A proven placement int64[layer, expert] where one is cheap, else None."""
    counts = instance.transitions
    free = not lexicographic and prices.gpu == prices.node == 0
    if instance.gpus == 1 or (instance.layers == 1 and instance.within is None) or free:
        linear = np.arange(instance.experts) // (instance.experts // instance.gpus)
        return np.tile(linear, (instance.layers, 1))
    if instance.gpus == instance.experts and not prices.node and not lexicographic:
        return one_expert_per_gpu(counts)
    if instance.within is not None:
        return None
    node_size = instance.node_size if lexicographic else prices.gpus_per_node
    if chain_work(instance.layers, instance.experts, instance.gpus, node_size) > min(
        EXACT_WORK, EXACT_WORK_PER_SECOND * time_limit
    ):
        return None
    if lexicographic and ((counts != np.rint(counts)).any() or (counts.sum() + 1.0) ** 2 > 2.0**53):
        return None  # the least difference in hops between nodes might weigh less than hops between GPUs
    node = np.arange(instance.gpus) // node_size
    outside = counts.sum() + 1.0 if lexicographic else prices.gpu + prices.node
    inside = 1.0 if lexicographic else prices.gpu
    cost = np.where(node[:, None] == node, inside, outside) * (1 - np.eye(instance.gpus))
    return chain_optimum(counts, cost, node_size, stop)


def _in_stages(instance: AffinityInstance, seconds: float, deadline: float, seed: int, stop: Stop) -> Ints:
    """Experts to nodes, then the experts of each node to its GPUs, both for fewest hops: int64[layer, expert]."""
    start = time.perf_counter()
    halfway = start + (deadline - start) / 2
    node_of_expert = _fewest_hops(instance.transitions, instance.nodes, seconds / 2, halfway, seed, stop)

    def inner(counts: Floats, node: int) -> Ints:
        now = time.perf_counter()
        until = now + (deadline - now) / (instance.nodes - node)
        return _fewest_hops(counts, instance.node_size, seconds / 2 / instance.nodes, until, seed + node, stop)

    return _within_nodes(instance, node_of_expert, inner)


def _within_nodes(instance: AffinityInstance, node_of_expert: Ints, inner: Callable[[Floats, int], Ints]) -> Ints:
    """The placement int64[layer, expert] of experts on the GPUs of their nodes.

    node_of_expert: int64[layer, expert]
    inner: places the experts of a node, from their hops float64[layer - 1, expert, expert] and its number
    """
    place = np.empty_like(node_of_expert)
    layers = np.arange(instance.layers)[:, None]
    for node in range(instance.nodes):
        here = np.nonzero(node_of_expert == node)[1].reshape(instance.layers, -1)
        counts = instance.transitions[layers[:-1, :, None], here[:-1, :, None], here[1:, None, :]]
        place[layers, here] = node * instance.node_size + inner(counts, node)
    return place


def _fewest_hops(counts: Floats, groups: int, seconds: float, deadline: float, seed: int, stop: Stop) -> Ints:
    """A placement int64[layer, expert] of few hops between equal groups, all hops alike."""
    instance = AffinityInstance(counts, groups)
    prices = instance.prices()
    exact = _exact(instance, prices, False, seconds, stop)
    if exact is not None:
        return exact
    linear = np.arange(instance.experts) // (instance.experts // groups)
    start = greedy_chain(prices, 0, linear, stop=lambda: stop() or time.perf_counter() > deadline)
    return search(prices, [start], seconds, deadline, seed, stop=stop)


class _Bound:
    """The least cost of any plan, from limits on the hops that groups of GPUs can keep.

    Hops kept in nodes and hops kept on GPUs are limited separately, each at its price.
    """

    def __init__(self, instance: AffinityInstance, prices: Prices, stop: Stop, deadline: float) -> None:
        self.counts, self.total = instance.transitions, instance.total
        self.experts = instance.experts
        self.groups = [(instance.gpus, prices.gpu)]
        if prices.node > 0:
            self.groups.append((instance.nodes, prices.node))
        elif prices.node < 0:
            # A hop inside a node costs more than one between nodes; a hop kept on a GPU is kept in its node too.
            self.groups = [(instance.gpus, prices.gpu + prices.node)]
        divisions = [groups for groups, _ in self.groups]
        limits = bounds.spectral_limits(self.counts, *divisions, stop=stop, deadline=deadline)
        self.layer_limits = list(limits.reshape(len(divisions), -1))
        self.kept = [float(limits.sum()) for limits in self.layer_limits]
        self.kept_within = 0.0
        if instance.within is not None:
            self.kept_within = float(sum(bounds.within_limit(count, instance.gpus) for count in instance.pairs_within))
        costs = np.array([instance.cost_gpu, instance.cost_node])
        whole = (self.counts == np.rint(self.counts)).all() and self.kept_within == 0.0
        self.whole = bool(whole and (costs == np.rint(costs)).all())

    def cost(self) -> float:
        """The bound. Limits are good to about 1e-12 of the total; whole costs may be rounded up beyond that."""
        full = self.total * sum(price for _, price in self.groups)
        least = full - sum(price * (kept + self.kept_within) for (_, price), kept in zip(self.groups, self.kept, strict=True))
        return max(0.0, float(math.ceil(least - 1e-9 * full)) if self.whole else least)

    def can_tighten(self, seconds: float) -> bool:
        """True if `tighten` has a method that is worth so many seconds of work."""
        if not len(self.counts) or not any(price > 0 for _, price in self.groups):
            return False
        few = any(self.experts // groups <= bounds.LARGEST_GROUP for groups, _ in self.groups)
        return few or bounds.affordable(len(self.counts) + 1, self.experts, seconds)

    def tighten(self, seconds: float, deadline: float, target: float, stop: Stop, on_change: Callable[[], None]) -> None:
        """Spend `seconds` of work, at most until `deadline`; where all hops cost the same, until `target` is reached."""
        windows = bounds.affordable(len(self.counts) + 1, self.experts, seconds)
        steps = [
            (which, method)
            for which, (groups, _) in enumerate(self.groups)
            for method, pays in (
                (bounds.heavy_limit, self.experts // groups <= bounds.LARGEST_GROUP),
                (bounds.keep_limit, windows),
            )
            if pays
        ]
        for step, (which, method) in enumerate(steps):
            groups, price = self.groups[which]
            now = time.perf_counter()

            def on_limit(kept: float, which: int = which) -> None:
                self.kept[which] = min(self.kept[which], kept)
                on_change()

            method(
                self.counts,
                groups,
                self.layer_limits[which],
                seconds / len(steps),
                now + (deadline - now) / (len(steps) - step),
                self.total - self.kept_within - target / price if len(self.groups) == 1 else 0.0,
                stop,
                on_limit,
            )


@cache
def compile_ahead() -> None:
    """Run every compiled function once, with the types that it always has."""
    hops_of(np.zeros((1, 2, 1), dtype=np.int16), 1)
    transitions = np.random.default_rng(0).random((2, 16, 16))
    prices, gpu = AffinityInstance(transitions, 2).prices(), np.zeros(1, dtype=np.int64)
    divide_anew(np.tile(np.arange(16).reshape(1, 2, 8), (1, 3, 1, 1)), prices, gpu, gpu, gpu + 1, 0.0)
    polish(prices, np.tile(np.arange(16) // 8, (3, 1)))
    bounds.heavy_limit(transitions, 4, np.full(2, np.inf), 1.0, math.inf, 0.0)
