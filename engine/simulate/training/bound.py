"""The time below which no schedule can bring a training step.

Two proofs, of which the larger time counts. One looks at computation and network apart and holds for any operators. The other
follows the chain of operators, where each needs the one before it, as in a transformer:

* The forward pass: no group of GPUs is earlier at an operator than the earliest of all ways to cut those before it (the dynamic
  programme of Lancet §5.1, with a time for each group).
* The backward pass: the chain of dX and all-to-alls, every MoE layer in its best number of parts. Weight gradients run in its
  gaps, or make it longer. A price y of a second of weight gradients, from 0 to 1 and never rising, decides no schedule but
  proves a bound: y times a layer's least time, and 1 - y times the computation of a group alone.
* The all-reduces: of the gradients that are made last all come after that.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import InputError
from engine.overlap.operator_axes import latest_last
from engine.overlap.operator_graph import OperatorGraph
from engine.overlap.pipeline_degree import pipeline_seconds
from engine.plan import Offload, Placement
from engine.problem import Problem
from engine.simulate.training.pricing import PricedStep, all_reduce_seconds, price_step
from engine.simulate.training.program import Gradient, gradients_of
from engine.workload import RoutingTrace

if TYPE_CHECKING:
    import networkx as nx

GRID = 2 ** (1 / 256)
"""Ratio of the sizes between which an all-reduce is taken to move the larger in the time of the smaller."""


@lru_cache(maxsize=32)  # asked for again with every plan of a placement
def bound_of_step(problem: Problem, placement: Placement, offload: Offload | None = None) -> float:
    """Seconds that every schedule of the step takes under this placement, however its operators are cut (into at most
    `MAX_PARTS` equal parts), fused, ordered and overlapped, with full buffers or only real tokens sent."""
    priced = {irregular: price_step(problem, placement, irregular, offload=offload) for irregular in (True, False)}
    apart = _apart(problem, list(priced.values()))
    graph, cells = priced[True].graph, priced[True].seconds[0, :, :MOST_GROUPS].size
    if cells * len(graph.of_phase("forward")) ** 2 > MOST_CELLS or (links := _chain(graph)) is None:
        return apart
    return max(apart, min(_along_the_chain(problem, step, links, irregular) for irregular, step in priced.items()))


def _apart(problem: Problem, priced: list[PricedStep]) -> float:
    """Seconds of every schedule of any operators, with one of these prices.

    No GPU computes two things at once, and the network carries one collective's worth at a time: both have a least total,
    before the loss, which needs the whole forward pass, and after it. A collective after the loss waits for the loss of all
    GPUs, and the loss of every GPU for all collectives before it; but a GPU's own computation after the loss does not wait
    for the slower GPUs. The update needs every gradient, and with it most communication.
    """
    import networkx as nx

    least = np.min([_least(step) for step in priced], axis=0)
    operators, graph = priced[0].graph.operators, priced[0].graph.graph()
    kinds = np.array([operator.kind for operator in operators])
    exchanged, update = np.isin(kinds, ("dispatch", "combine")), kinds == "update"
    computed = ~(exchanged | update | (kinds == "gradient"))
    first, after = _around_the_loss(priced[0], graph)
    waited_for = _among(priced[0], *(nx.ancestors(graph, operator.name) for operator in priced[0].graph.of_phase("update")))
    reduced = _all_reduced(problem, priced[0])

    def total(which: np.ndarray) -> np.ndarray:
        return least[which].sum(axis=0)

    before, behind, last = total(computed & first), total(computed & after), total(update)
    sent_before = total(exchanged & first).max()
    sent_behind = max(
        total(exchanged & after).max() + reduced, total(exchanged & after & waited_for).max() + reduced + last.max()
    )
    on_gpus = (before + behind + last).max(), sent_before + (behind + last).max()
    return float(max(*on_gpus, max(before.max(), sent_before) + sent_behind))


def _least(priced: PricedStep) -> np.ndarray:
    """float64[operator, gpu]: seconds in the number of parts that takes least."""
    parts = np.arange(1, priced.seconds.shape[1] + 1)
    least = (priced.seconds * parts[None, :, None]).min(axis=1)
    group = np.empty(sum(map(len, priced.groups)), dtype=np.int64)
    for index, members in enumerate(priced.groups):
        group[list(members)] = index
    return least[:, group]


def _around_the_loss(priced: PricedStep, graph: "nx.DiGraph") -> tuple[np.ndarray, np.ndarray]:
    """bool[operator] twice: operators that must be over before the backward pass begins, and those that cannot begin before.
    Without a loss none is before; one that neither leads to the loss nor follows from it may run on either side and is left
    out."""
    import networkx as nx

    loss = next((operator.name for operator in priced.graph.of_phase("forward") if operator.kind == "loss"), None)
    if loss is None:
        return _among(priced), ~_among(priced)
    return _among(priced, nx.ancestors(graph, loss), {loss}), _among(priced, nx.descendants(graph, loss))


def _among(priced: PricedStep, *names: set[str]) -> np.ndarray:
    """bool[operator]: True if its name is in one of the sets."""
    return np.array([any(operator.name in some for some in names) for operator in priced.graph.operators], dtype=bool)


def _all_reduced(problem: Problem, priced: PricedStep) -> float:
    """Seconds that the network needs for all gradients."""
    gradients = priced.graph.of_phase("all_reduce")
    seconds = sum(gradient.seconds for gradient in gradients if gradient.seconds is not None)
    seconds += _least_all_reduce(problem, sum(gradient.sent for gradient in gradients if gradient.seconds is None))
    if priced.expert_groups > 1:
        own = sum(operator.parameters for operator in priced.graph.of_phase("forward") if operator.kind == "experts")
        seconds += _least_all_reduce(problem, own * problem.model.bytes_per_number, priced.expert_groups)
    return seconds


def _least_all_reduce(problem: Problem, sent: float, groups: int = 1) -> float:
    """Seconds that all-reduces of `sent` bytes take at the very least, in any pieces of at least a byte: at the best rate of
    any size. More bytes never take less time, so that a size takes at least as long as the one below it on a grid."""
    if sent <= 1:
        return 0.0
    # Sizes beyond a measured source cannot be simulated either; half of its reach is already at its last rate.
    largest = sent
    while not _is_priced(problem, largest, groups):
        largest /= 2
    sizes = np.geomspace(1.0, largest, 2 + int(np.log(largest) / np.log(GRID)))
    return float(sent * (all_reduce_seconds(problem, sizes[:-1], groups) / sizes[1:]).min())


def _is_priced(problem: Problem, size: float, groups: int) -> bool:
    try:
        all_reduce_seconds(problem, [size], groups)
    except InputError:
        return size <= 1  # asked for again, it says why
    return True


PRICES = np.linspace(0.0, 1.0, 65)[:, None]
"""The prices of a second of weight gradients that are tried."""
MOST_GROUPS = 8
"""Groups of GPUs that the chain is followed on: those that most often take longest."""
MOST_CELLS = 100_000_000
"""Pairs of operators, parts and groups above which the chain is not followed: some seconds."""
MOST_INSIDE = 3
"""Weight gradients between the all-to-alls of a layer of which every choice is looked at."""
MOE = ("dispatch", "experts", "combine")


@dataclass(frozen=True)
class _Layer:
    """An MoE layer in the backward pass, by places of operators.

    before: dX since the layer before
    there, back: its all-to-alls
    dx, dw: between them
    ready: weight gradients with their inputs there when this layer's last all-to-all begins, and not one layer earlier
    """

    before: list[int]
    there: int
    back: int
    dx: list[int]
    dw: list[int]
    ready: list[int]


@dataclass(frozen=True)
class _Chain:
    """A step in which every operator needs the one before it, weight gradients aside, by places of operators.

    behind: dX behind the last MoE layer
    dw: all weight gradients
    last: of the last gradient, which none of these may follow; None: any may be the last
    """

    forward: list[int]
    layers: tuple[_Layer, ...]
    behind: list[int]
    dw: list[int]
    last: int | None


def _chain(graph: OperatorGraph) -> _Chain | None:
    """The chain of a step; None where an all-to-all may run beside an operator that is neither cut nor a weight gradient."""
    import networkx as nx

    operators = graph.operators
    place = {operator.name: index for index, operator in enumerate(operators)}
    needs: list[set[int]] = [set() for _ in operators]
    for dependency in graph.dependencies:
        needs[place[dependency.after]].add(place[dependency.before])
    issued = [index for index, operator in enumerate(operators) if operator.phase in ("forward", "dx", "dw")]
    forward = [index for index in issued if operators[index].phase == "forward"]
    dw = [index for index in issued if operators[index].phase == "dw"]
    dx = [index for index in issued if operators[index].phase == "dx"]
    exchanges = [index for index in dx if operators[index].network]
    pairs = list(zip(exchanges[::2], exchanges[1::2], strict=False))
    layers = [operators[index].layer for index in exchanges]
    if not forward or not dx or dx[0] < forward[-1] or layers[::2] != layers[1::2] or len({*layers}) * 2 != len(layers):
        return None
    for one, other in pairwise(forward + dx):
        meets = operators[one].network != operators[other].network
        if meets and one not in needs[other] and one not in exchanges[1::2]:
            return None
    whole, of_dx, bounds = graph.graph(), {*dx}, [-1, *(back for _, back in pairs)]
    of_dw = {index: max(needs[index] & of_dx, default=-1) for index in dw}
    if min(of_dw.values(), default=0) < 0:
        return None
    found = []
    for number, (there, back) in enumerate(pairs):
        inside = [index for index in dw if there < index < back]
        # Nothing may slip in just before a layer: what its last input needs comes after all all-to-alls so far.
        input_of = issued[issued.index(there) - 1]
        earlier = {operators[index].name for index in chain(forward, exchanges[: 2 * number]) if operators[index].network}
        known = nx.ancestors(whole, operators[input_of].name)
        first = next(index for index in dx if index > there)
        if (
            input_of not in needs[there]
            or not earlier <= known
            or len(inside) > MOST_INSIDE
            or any(index < first and there not in needs[index] for index in inside)
        ):
            return None
        found.append(
            _Layer(
                before=[index for index in dx if max(bounds[number], forward[-1]) < index < there],
                there=there,
                back=back,
                dx=[index for index in dx if there < index < back],
                dw=inside,
                ready=[index for index in dw if bounds[number] <= of_dw[index] < back],
            )
        )
    last = dw[-1] if dw and dw[-1] > dx[-1] else None
    if last is not None and not {operators[index].name for index in exchanges} <= nx.ancestors(whole, operators[last].name):
        last = None
    return _Chain(forward, tuple(found), [index for index in dx if index > max(bounds[-1], forward[-1])], dw, last)


def _along_the_chain(problem: Problem, priced: PricedStep, links: _Chain, irregular: bool) -> float:
    """Seconds of every schedule of a chain with these prices."""
    operators, seconds = priced.graph.operators, _slowest(priced)
    whole, least = seconds[:, 0], (seconds * np.arange(1, seconds.shape[1] + 1)[:, None]).min(axis=1)
    kinds = [operators[place].kind for place in links.forward]
    own = seconds[links.forward]
    latest = np.full(len(kinds), len(kinds) - 1)
    as_recorded = irregular and problem.step.routing == "recorded" and isinstance(problem.workload, RoutingTrace)
    if problem.graph is None:
        latest = latest_last(kinds, problem.step.gate)
        own[~np.isin(kinds, MOE), problem.step.batch :] = np.inf
    unlike = np.isin(kinds, MOE) & (as_recorded and problem.graph is None)
    network = np.array([operators[place].network for place in links.forward])
    begun = _forward(own, network, latest, unlike)
    end, layer_ends = _backward(seconds, links, begun)
    update = whole[[place for place, operator in enumerate(operators) if operator.phase == "update"]].sum(axis=0)
    place = {operator.name: index for index, operator in enumerate(operators)}
    gradients = gradients_of(priced.graph, problem, priced.expert_groups, place)
    rates = {groups: _least_rate(problem, gradients, groups) for groups in {gradient.groups for gradient in gradients}}
    found = [float((end + update).max())]
    if links.last is not None:
        final = [gradient for gradient in gradients if links.last in gradient.after]
        reduced = sum(_reduced([one], {one.groups: _least_rate(problem, [one], one.groups)}) for one in final[:1])
        found.append(float(end.max()) + reduced + update.max())
    ready_in = dict.fromkeys(links.dw, len(links.layers))
    ready_in |= {place: number for number, layer in enumerate(links.layers) for place in layer.ready}
    for number, at in enumerate([float(begun.max()), *layer_ends]):
        later = [one for one in gradients if any(ready_in.get(place, -1) >= number for place in one.after)]
        exchanged = sum(least[[layer.there, layer.back]].max(axis=1).sum() for layer in links.layers[number:])
        found.append(at + exchanged + _reduced(later, rates) + update.max())
    return max(found)


def _slowest(priced: PricedStep) -> np.ndarray:
    """float64[operator, parts - 1, group]: seconds of one part, of the groups that are slowest at most of the work."""
    whole = priced.seconds[:, 0]
    weight = np.bincount(whole.argmax(axis=1), whole.max(axis=1), whole.shape[1])
    return priced.seconds[:, :, np.sort(np.argsort(-weight, kind="stable")[:MOST_GROUPS])]


def _forward(seconds: np.ndarray, network: np.ndarray, latest: np.ndarray, unlike: np.ndarray) -> np.ndarray:
    """float64[group]: the earliest end of a chain on every group.

    seconds: float64[operator, parts - 1, group] of one part
    network: bool[operator]
    latest: int64[operator], the last operator up to which a stretch that begins here can be cut
    unlike: bool[operator], True if only the sum of its parts is known

    Of a stage the first part begins when the first part of the stage before it and all parts of the one before that are over;
    the last part ends when all its parts could follow one another, and not before the last part of the stage before it.
    """
    operators, parts, groups = seconds.shape
    ends = np.zeros((operators + 1, groups))
    count, shape = np.arange(2, parts + 1)[:, None, None], (parts - 1, operators, groups)
    begin, before, whole, one = (np.zeros(shape) for _ in range(4))
    free = np.zeros((2, *shape))
    """When a stream is free for the next stage, without a part of the one before it."""
    begins = 0
    for operator in range(operators):
        on, at = int(network[operator]), ends[operator].max() if network[operator] else ends[operator]
        while latest[begins] < operator and begins < operator:
            begins += 1
        old, own = np.s_[:, begins:operator], np.s_[:, begins : operator + 1]
        if operator and network[operator - 1] != network[operator]:
            end, first = np.maximum(begin[old] + whole[old], before[old] + one[old]), begin[old] + one[old]
            free[1 - on][old] = end
            if on:
                end, first = end.max(axis=-1, keepdims=True), first.max(axis=-1, keepdims=True)
            before[old], begin[old] = end, np.maximum(free[on][old], first)
            whole[old], one[old] = 0.0, 0.0
        begin[:, operator], before[:, operator], free[:, :, operator] = at, at, ends[operator]
        part = seconds[operator, 1:, None]
        whole[own] += (seconds[operator] * np.arange(1, parts + 1)[:, None]).min(axis=0) if unlike[operator] else part * count
        one[own] += 0.0 if unlike[operator] else part
        ends[operator + 1] = at + seconds[operator, 0]
        if latest[begins] >= operator and parts > 1:
            cut = np.maximum(begin[own] + whole[own], before[own] + one[own]).min(axis=(0, 1))
            np.minimum(ends[operator + 1], cut, out=ends[operator + 1])
    return ends[-1]


def _backward(seconds: np.ndarray, links: _Chain, begun: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """(the earliest end of the computation of every group, float64[group]; the earliest end of every MoE layer).

    seconds: float64[operator, parts - 1, group] of one part
    begun: float64[group], the earliest end of the forward pass
    """
    whole, parts = seconds[:, 0], np.arange(1, seconds.shape[1] + 1)
    steps, layer_ends, at = [], [], None
    for layer in links.layers:
        own, dx = whole[layer.before].sum(axis=0), seconds[layer.dx].sum(axis=0)
        reached = (begun + own).max() if at is None else at + own.max()
        there, back = seconds[layer.there].max(axis=1), seconds[layer.back].max(axis=1)
        # Whole: weight gradients run under both all-to-alls.
        ways = [(there[0] + dx[0].max() + back[0], dx[0], [])]
        gap = max(there[0], back[0]) + dx[0].max() - dx[0]
        for inside in chain.from_iterable(combinations(layer.dw, size) for size in range(len(layer.dw) + 1)):
            # Cut: those that are inside are cut too, all others come behind.
            experts = dx + seconds[list(inside)].sum(axis=0)
            least = pipeline_seconds(there, experts.max(axis=1), back)
            busy = np.maximum(there[:, None] + parts[:, None] * experts, (parts * there)[:, None] + experts)
            gap = np.maximum(gap, (least[:, None] - busy)[1:].max(axis=0, initial=0.0))
            ways += [(least[degree], busy[degree], list(inside)) for degree in range(1, len(parts))]
        steps.append((layer, own, reached - (begun if at is None else at), ways, gap))
        at = reached + min(least for least, _, _ in ways)
        layer_ends.append(at)
    # No weight gradient is hidden longer than the longest gap, and the waits for other groups around it.
    late = [waits - own for _, own, waits, _, _ in steps] + [np.zeros_like(begun)]
    longest = [gap + np.maximum(*late[number : number + 2]) for number, (*_, gap) in enumerate(steps)]
    hidden = np.minimum(whole, np.max(longest, axis=0)) if steps else whole
    total = np.zeros((len(PRICES), len(begun)))
    for layer, own, waits, ways, _ in reversed(steps):
        gain = np.inf
        for least, busy, inside in ways:
            apart = own + busy - hidden[inside].sum(axis=0)
            shown = (whole[inside] - hidden[inside]).sum(axis=0)
            gain = np.minimum(gain, PRICES * (waits + least) + (1 - PRICES) * apart - shown)
        total = gain - PRICES * hidden[layer.ready].sum(axis=0) + np.maximum.accumulate(total)
    return begun + total.max(axis=0) + whole[links.behind + links.dw].sum(axis=0), layer_ends


def _least_rate(problem: Problem, gradients: Iterable[Gradient], groups: int) -> float:
    """Seconds for each byte of these gradients at the least, of those that are summed over so many groups."""
    sent = sum(one.sent for one in gradients if one.seconds is None and one.groups == groups)
    return _least_all_reduce(problem, sent, groups) / sent if sent else 0.0


def _reduced(gradients: Iterable[Gradient], rates: dict[int, float]) -> float:
    """Seconds of the network for some gradients. rates: seconds for each byte, by number of groups"""
    return sum(one.sent * rates[one.groups] if one.seconds is None else one.seconds for one in gradients)
