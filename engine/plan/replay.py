"""A schedule made for one traffic matrix, carried out on another: what happens to a plan at run time."""

import numpy as np

from engine.plan.send_order import Schedule


def replay(schedule: Schedule, traffic: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The sends (src int64, dst int64, bytes float64, phase int64; each [send]) that carry `traffic` in the schedule's
    order. traffic: float64[src, dst] bytes with a zero diagonal.

    A pair keeps its place and its split over phases, scaled to the bytes there really are. Pairs that the schedule does
    not know go last, in rotation: GPU i to GPU i + k in the k-th phase, so that a matched order stays one. Sends without bytes
    disappear.
    """
    n = len(traffic)
    src, dst, planned = schedule.src.astype(np.int64), schedule.dst.astype(np.int64), schedule.bytes
    pair = src * n + dst
    total = np.bincount(pair, planned, n * n)
    size = planned / np.where(total > 0, total, 1.0)[pair] * traffic[src, dst]
    unknown_src, unknown_dst = np.nonzero((traffic > 0) & (total.reshape(n, n) == 0))
    turn = (unknown_dst - unknown_src) % n
    by_turn = np.argsort(turn, kind="stable")
    unknown_src, unknown_dst, turn = unknown_src[by_turn], unknown_dst[by_turn], turn[by_turn]
    src, dst = np.concatenate([src, unknown_src]), np.concatenate([dst, unknown_dst])
    size = np.concatenate([size, traffic[unknown_src, unknown_dst]])
    phase = np.concatenate([schedule.phase, schedule.phases + turn])
    real = size > 0
    return src[real], dst[real], size[real], phase[real]
