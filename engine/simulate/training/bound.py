"""A time below which no schedule can bring a training step."""

import networkx as nx
import numpy as np

from engine.errors import InputError
from engine.plan import Placement
from engine.problem import Problem
from engine.simulate.training.pricing import PricedStep, all_reduce_seconds, price_step

GRID = 2 ** (1 / 256)
"""Ratio of the sizes between which an all-reduce is taken to move the larger in the time of the smaller."""


def bound_of_step(problem: Problem, placement: Placement) -> float:
    """Seconds that every schedule of the step takes under this placement, however its operators are cut (into at most
    `MAX_PARTS` equal parts), fused, ordered and overlapped, whether full buffers or only real tokens are sent.

    No GPU computes two things at once, and the network carries one collective's worth at a time: both have a least total,
    before the loss, which needs the whole forward pass, and after it. A collective after the loss waits for the loss of all
    GPUs, and the loss of every GPU for all collectives before it; but a GPU's own computation after the loss does not wait
    for the slower GPUs. The update needs every gradient, and with it most communication.
    """
    priced = [price_step(problem, placement, irregular) for irregular in (True, False)]
    least = np.min([_least(step) for step in priced], axis=0)
    operators, graph = priced[0].graph.operators, priced[0].graph.graph()
    kinds = np.array([operator.kind for operator in operators])
    exchanged, update = np.isin(kinds, ("dispatch", "combine")), kinds == "update"
    computed = ~(exchanged | update | (kinds == "gradient"))
    first, after = _around_the_loss(priced[0], graph)
    waited_for = _among(
        priced[0], *(nx.ancestors(graph, operator.name) for operator in priced[0].graph.of_phase("update"))
    )
    reduced = _all_reduced(problem, priced[0])

    def total(which: np.ndarray) -> np.ndarray:
        return least[which].sum(axis=0)

    before, behind, last = total(computed & first), total(computed & after), total(update)
    sent_before = total(exchanged & first).max()
    sent_behind = max(
        total(exchanged & after).max() + reduced, total(exchanged & after & waited_for).max() + reduced + last.max()
    )
    return float(
        max(
            (before + behind + last).max(),
            sent_before + (behind + last).max(),
            max(before.max(), sent_before) + sent_behind,
        )
    )


def _least(priced: PricedStep) -> np.ndarray:
    """float64[operator, gpu]: seconds in the number of parts that takes least."""
    parts = np.arange(1, priced.seconds.shape[1] + 1)
    least = (priced.seconds * parts[None, :, None]).min(axis=1)
    group = np.empty(sum(map(len, priced.groups)), dtype=np.int64)
    for index, members in enumerate(priced.groups):
        group[list(members)] = index
    return least[:, group]


def _around_the_loss(priced: PricedStep, graph: nx.DiGraph) -> tuple[np.ndarray, np.ndarray]:
    """bool[operator] twice: what must be over before the backward pass begins, and what cannot begin before. Without a loss
    nothing is before; what neither leads to the loss nor follows from it may run on either side and is left out."""
    loss = next(
        (
            operator.name
            for operator in priced.graph.operators
            if (operator.kind, operator.phase) == ("loss", "forward")
        ),
        None,
    )
    if loss is None:
        return _among(priced), ~_among(priced)
    return _among(priced, nx.ancestors(graph, loss), {loss}), _among(priced, nx.descendants(graph, loss))


def _among(priced: PricedStep, *names: set[str]) -> np.ndarray:
    """bool[operator]: whether its name is in one of the sets."""
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
    """Seconds that all-reduces of `sent` bytes take at the very least, in whatever pieces of at least a byte: at the best
    rate of any size. More bytes never take less time, so that a size takes at least as long as the one below it on a grid.
    """
    if sent <= 1:
        return 0.0
    # What a measured source does not tell cannot be simulated either; half of its reach is already at its last rate.
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
