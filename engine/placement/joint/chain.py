"""Exchanges between two GPUs in many layers at once, the exact best by dynamic programming over the layers."""

from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from engine.placement.joint.state import EVENNESS, TOLERANCE, JointState

MOST_EXCHANGES = 4096
"""Exchanges of two experts against two are left out where there would be more: at over 11 experts per GPU."""
MOST_CELLS = 2**15
"""Exchanges times layers of one chain: some ten milliseconds."""
CHOICES = 16
"""Exchanges of every layer that the dynamic programme chooses from: those that are best with the other layers as they
are. More were slower and gave no better plans in the same time on recorded traffic."""


def chain(state: JointState, first_gpu: int, second_gpu: int, low: int, high: int, price: float = 0.0) -> list[int]:
    """Exchange experts of two GPUs in the layers low … high - 1 so that the objective falls most, at most one exchange of
    one or two experts against as many a layer; returns the layers that changed.

    Exchanges of neighbouring layers add up, but for twice the tokens between the experts exchanged, so the best choice
    is a shortest path. Where the worst workload counts, a mixture guides instead; what makes that objective worse, or
    moves more experts than may be moved, is taken back. price: cost of a (layer, expert) pair that leaves its GPU.
    """
    terms = state.terms
    sizes = int(terms.instance.slots[first_gpu]), int(terms.instance.slots[second_gpu])
    if not min(sizes):
        return []
    table, reverse = _exchanges(*sizes)
    here = state.place[low:high]
    members = [np.nonzero(here == gpu)[1].reshape(len(here), -1) for gpu in (first_gpu, second_gpu)]
    member = np.concatenate(members, axis=1)
    on_hops, on_peaks = state.guide(state.hops), state.guide(state.peaks)
    cost = np.tensordot(on_hops, state.cost[:, low:high, :, second_gpu] - state.cost[:, low:high, :, first_gpu], axes=1)
    alone = np.take_along_axis(cost, member, axis=1) @ reverse
    for workload, share in enumerate(on_peaks):
        shift = np.take_along_axis(terms.load[workload, low:high], member, axis=1) @ reverse
        load = state.gpu_load[workload, low:high]
        rest = np.delete(load, (first_gpu, second_gpu), axis=1).max(axis=1, initial=0.0)[:, None]
        after = np.maximum(np.maximum(load[:, first_gpu, None] - shift, load[:, second_gpu, None] + shift), rest)
        alone += share * (after - state.peak[workload, low:high, None])
        alone += (
            (2 * EVENNESS * share / terms.unit) * shift * (load[:, second_gpu, None] - load[:, first_gpu, None] + shift)
        )
    if price > 0:
        home = np.take_along_axis(state.start[low:high], member, axis=1)
        alone += ((home == first_gpu) * price - (home == second_gpu) * price) @ reverse
    picks, choices = _shortest(state, alone, table, member, low, on_hops, terms.distance[first_gpu, second_gpu] * 2)
    mark, before = len(state.journal), state.objective
    for offset, pick in enumerate(picks):
        if pick >= 0:
            exchange = table[choices[offset, pick]]
            pairs = zip(member[offset, exchange > 0], member[offset, exchange < 0], strict=True)
            for first, second in pairs:
                state.swap(low + offset, int(first), int(second))
    if not state.legal or (terms.worst and state.objective > before + TOLERANCE):
        state.undo(mark)
        return []
    return [low + offset for offset, pick in enumerate(picks) if pick >= 0]


def longest_chain(state: JointState, first_gpu: int, second_gpu: int) -> int:
    """Layers that a chain between two GPUs takes in without keeping a caller that wants to stop waiting."""
    sizes = int(state.terms.instance.slots[first_gpu]), int(state.terms.instance.slots[second_gpu])
    return max(4, MOST_CELLS // len(_exchanges(*sizes)[0])) if min(sizes) else state.layers


def _shortest(
    state: JointState,
    alone: NDArray[np.float64],
    table: NDArray[np.float64],
    member: NDArray[np.int64],
    low: int,
    on_hops: NDArray[np.float64],
    apart: float,
) -> tuple[list[int], NDArray[np.int64]]:
    """The choice of every layer (-1: no exchange) and the exchange that every choice stands for, int64[layer, choice]."""
    layers, exchanges = alone.shape
    count = min(CHOICES if layers > 1 else 1, exchanges)
    choices = np.argpartition(alone, count - 1, axis=1)[:, :count]
    alone = np.take_along_axis(alone, choices, axis=1)
    value, steps, index = np.append(alone[0], 0.0), [], np.arange(count + 1)
    for layer in range(1, layers):
        hop = state.terms.hop[:, low + layer - 1][:, member[layer - 1][:, None], member[layer]]
        tokens = hop[0] if len(hop) == 1 else np.tensordot(on_hops, hop, axes=1)
        total = np.zeros((count + 1, count + 1))
        total[:count, :count] = table[choices[layer - 1]] @ tokens @ table[choices[layer]].T
        total *= -apart
        total[:, :count] += alone[layer]
        total += value[:, None]
        steps.append(total.argmin(axis=0))
        value = total[steps[-1], index]
    if not value.min() < -TOLERANCE:
        return [-1] * layers, choices
    picks = [int(value.argmin())]
    for step in reversed(steps):
        picks.append(int(step[picks[-1]]))
    return [pick if pick < count else -1 for pick in reversed(picks)], choices


@cache
def _exchanges(first: int, second: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64[exchange, expert of one or the other GPU] and its transpose: 1 leaves the first GPU, -1 the second."""
    rows = []
    for size in (1, 2):
        ways = [
            (left, right) for left in combinations(range(first), size) for right in combinations(range(second), size)
        ]
        if size > 1 and len(ways) > MOST_EXCHANGES:
            break
        block = np.zeros((len(ways), first + second))
        for row, (left, right) in zip(block, ways, strict=True):
            row[list(left)] = 1.0
            row[[first + index for index in right]] = -1.0
        rows.append(block)
    table = np.concatenate(rows)
    table.setflags(write=False)
    return table, np.ascontiguousarray(table.T)
