"""A time below which no schedule can bring a training step."""

import networkx as nx
import numpy as np

from engine.plan import Placement
from engine.problem import Problem
from engine.simulate.training.pricing import PricedStep, all_reduce_seconds, price_step

SMALLEST = 1024.0


def bound_of_step(problem: Problem, placement: Placement) -> float:
    """Seconds that every schedule of the step takes under this placement, however its operators are cut (into at most
    `MAX_PARTS` parts), fused, ordered and overlapped, and if only real tokens are sent.

    No GPU computes two things at once, and the network carries one collective's worth at a time: both have a least total,
    before the loss, which needs the whole forward pass, and after it. The update needs every gradient, and every all-to-all
    of the backward pass comes before some gradient, so it follows all communication.
    """
    priced = price_step(problem, placement, irregular=True)
    operators = priced.graph.operators
    parts = np.arange(1, priced.seconds.shape[1] + 1)
    least = (priced.seconds * parts[None, :, None]).min(axis=1)
    kinds = np.array([operator.kind for operator in operators])
    exchanged, reduced, update = np.isin(kinds, ("dispatch", "combine")), kinds == "gradient", kinds == "update"
    computed = ~(exchanged | reduced | update)
    first, after = _around_the_loss(priced)
    sent = sum(operator.sent for operator in operators if operator.kind == "gradient")
    all_reduced = _least_all_reduce(problem, sent)
    if priced.expert_groups > 1:
        number = problem.model.bytes_per_number
        own = sum(one.parameters for one in operators if one.kind == "experts" and one.phase == "forward")
        all_reduced += _least_all_reduce(problem, own * number, priced.expert_groups)

    def total(which: np.ndarray) -> float:
        return float(least[which].sum(axis=0).max(initial=0.0))

    forward = max(total(computed & first), total(exchanged & first))
    backward = max(total(computed & after), total(exchanged & after) + all_reduced)
    return forward + backward + total(update)


def _around_the_loss(priced: PricedStep) -> tuple[np.ndarray, np.ndarray]:
    """bool[operator] twice: what must be over before the backward pass begins, and what cannot begin before. Without a loss
    nothing is before; what neither leads to the loss nor follows from it may run on either side and is left out."""
    graph, names = priced.graph.graph(), [operator.name for operator in priced.graph.operators]
    loss = next((one.name for one in priced.graph.operators if (one.kind, one.phase) == ("loss", "forward")), None)
    if loss is None:
        return np.zeros(len(names), dtype=bool), np.ones(len(names), dtype=bool)
    sides = (nx.ancestors(graph, loss) | {loss}, nx.descendants(graph, loss))
    first, after = (np.array([name in side for name in names]) for side in sides)
    return first, after


def _least_all_reduce(problem: Problem, sent: float, groups: int = 1) -> float:
    """Seconds that all-reduces of `sent` bytes take at the very least, in whatever pieces: at the best rate of any size.

    Times are lines or run straight between measured sizes, which are powers of two, so that the best rate is at one of
    these or at the whole.
    """
    if sent <= 0:
        return 0.0
    sizes = np.unique([*SMALLEST * 2.0 ** np.arange(max(0, np.log2(sent / SMALLEST)) + 1), sent])
    sizes = sizes[sizes <= sent]
    return float(sent * (all_reduce_seconds(problem, sizes, groups) / sizes).min())
