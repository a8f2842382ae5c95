"""A proven limit on how fast two models on one cluster can be, whatever their placements and the order of sends.

Table 2 of Aurora grows with every time put into it, so lower limits of its parts give a lower limit of the whole.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class ModelTables:
    """What one model asks of GPUs in one layer; seconds.

    gate, aggregate: float64[gpu]; ffn, receive: float64[gpu, expert], what an expert adds to the computation and to the
    receiving port of its GPU in one all-to-all, in the fastest direction of that port; send_total: float64[gpu] and
    send_saved: float64[gpu, expert], what the GPU sends if it keeps no token, and how much less for an expert of its own.
    start_up: seconds before the first byte of an all-to-all, 0 where nothing has to move.
    """

    gate: NDArray[np.float64]
    aggregate: NDArray[np.float64]
    ffn: NDArray[np.float64]
    receive: NDArray[np.float64]
    send_total: NDArray[np.float64]
    send_saved: NDArray[np.float64]
    start_up: float


def cycle_bound(a: ModelTables, b: ModelTables, slots: NDArray[np.int64], next_gate: NDArray[np.float64]) -> float:
    """Seconds below which one cycle of two colocated models cannot be, from when a's gate has ended everywhere to when its
    next gate has.

    slots: int64[gpu], the most experts of each model on a GPU. next_gate: float64[gpu], a's gate of the next layer, 0 after
    the last. Every term follows a chain of steps that wait for each
    other: a GPU computes F^a before F^b, the combine of a model follows its experts, and A^b and the next G^a follow all
    four all-to-alls on every GPU (see `engine.simulate.colocated`).
    """
    sends_a, sends_b, sends_both = _least_port((a,), slots), _least_port((b,), slots), _least_port((a, b), slots)
    ffn_a, ffn_b = least_largest(a.ffn), least_largest(b.ffn)
    ffn_both = least_largest(np.concatenate([a.ffn, b.ffn], axis=1))
    quickest = min(a.start_up, b.start_up)
    # The GPU whose gate of a ends last has its gate of b still to do.
    dispatched = max(sends_both + quickest, float(b.gate.min()) + sends_b + b.start_up)
    end_ffn_a = sends_a + a.start_up + ffn_a
    end_ffn_b = max(dispatched + ffn_b, sends_a + a.start_up + ffn_both)
    end_combine_a = end_ffn_a + sends_a + a.start_up
    # Both combines follow F^a on every GPU, that of b because F^b does.
    end_combine_b = max(end_ffn_b + sends_b + b.start_up, end_ffn_a + sends_both + quickest)
    return max(
        end_combine_b + float((b.aggregate + next_gate).max()),
        end_combine_a + float((a.aggregate + b.aggregate + next_gate).max()),
    )


def least_largest(table: NDArray[np.float64]) -> float:
    """A lower limit of the largest GPU sum, over all ways to give each expert to one GPU. table: float64[gpu, expert].

    Some GPU takes the heaviest expert; and the largest sum is at least any weighted mean of all sums, here with weights in
    proportion to the GPUs' speed, in which every expert counts at least its least weighted entry.
    """
    if not table.size:
        return 0.0
    total = table.sum(axis=1)
    weight = 1 / np.where(total > 0, total, np.inf)
    weight = weight / weight.sum() if weight.sum() > 0 else np.full(len(table), 1 / len(table))
    return float(max(table.min(axis=0).max(), (weight[:, None] * table).min(axis=0).sum()))


def _least_port(models: tuple[ModelTables, ...], slots: NDArray[np.int64]) -> float:
    """A lower limit of the busiest port's seconds when one all-to-all of each model is under way."""
    receiving = least_largest(np.concatenate([one.receive for one in models], axis=1))
    sending = np.zeros(len(slots))
    for one in models:
        saved = -np.sort(-one.send_saved, axis=1)
        kept = np.where(np.arange(saved.shape[1]) < slots[:, None], saved, 0.0).sum(axis=1)
        sending += np.maximum(one.send_total - kept, 0.0)
    return max(receiving, float(sending.max()))
