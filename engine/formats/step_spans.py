"""Loads of many steps in few spans of time."""

import numpy as np

from engine.formats.arrays import MAX_SPLIT
from engine.workload import Finding

MAX_SPANS = 64


def split_steps(steps: np.ndarray, numbers: int) -> list[np.ndarray]:
    """`steps` (int64[...], in the order of time) in spans of equally many, at least one.

    numbers: in the loads of one span; those of all spans are at most `MAX_SPLIT`
    """
    return np.array_split(steps, max(1, min(MAX_SPANS, len(steps), MAX_SPLIT // max(numbers, 1))))


def sum_spans(counts: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The loads of every span, float64[span, layer, expert], see `split_steps`.

    counts: number[step, layer, expert]
    order: int64[...]; the steps that count, in the order of time
    """
    return np.stack([counts[span].sum(axis=0, dtype=np.float64) for span in split_steps(order, counts[0].size)])


def steps_of_ring(counts: np.ndarray) -> tuple[np.ndarray, int]:
    """(the steps with tokens, int64[...], the oldest first as far as can be told; the number of runs of empty ones, around the
    end too). The longest run was not filled yet, so the oldest step follows it; without an empty step all are in order.

    counts: number[step, layer, expert]
    """
    used = np.flatnonzero(counts.any(axis=(1, 2)))
    if len(used) in (0, len(counts)):
        return np.arange(len(counts)), int(not used.size)
    gap = (np.roll(used, -1) - used - 1) % len(counts)
    return np.roll(used, -(int(gap.argmax()) + 1)), int(np.count_nonzero(gap))


def empty_steps(steps: int, used: int, runs: int) -> Finding:
    """The finding on steps of a ring that are left out, see `steps_of_ring`."""
    message = f"{steps - used} of {steps} steps of the buffer are empty and left out"
    message += f", in {runs} runs: the order of time is taken to begin after the longest." if runs > 1 else "."
    return Finding(severity="warning" if runs > 1 else "ok", code="empty-steps", message=message)


class StepSpans:
    """Sums over spans while the number of steps is not known yet: the last span may have fewer steps, and once all are full
    each pair of neighbours becomes one. No span is kept if the loads of two would take more than `MAX_SPLIT` numbers."""

    def __init__(self, layers: int, experts: int) -> None:
        most = min(MAX_SPANS, MAX_SPLIT // (layers * experts)) // 2 * 2
        self._sums = np.zeros((most, layers, experts))
        self._steps_of_span = 1
        self.steps = 0

    def add(self, load: np.ndarray) -> None:
        """Add the next step. load: number[layer, expert]"""
        if not len(self._sums):
            return
        if self.steps == len(self._sums) * self._steps_of_span:
            halved = self._sums.reshape(-1, 2, *load.shape).sum(axis=1)
            self._sums[:] = 0
            self._sums[: len(halved)] = halved
            self._steps_of_span *= 2
        self._sums[self.steps // self._steps_of_span] += load
        self.steps += 1

    @property
    def by_step(self) -> np.ndarray | None:
        """The loads by span, float64[span, layer, expert], in the order of time; None for fewer than two."""
        spans = -(-self.steps // self._steps_of_span)
        return self._sums[:spans].copy() if spans > 1 else None
