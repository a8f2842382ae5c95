"""All-to-alls and all-reduces on one network: their waiting, and the size of the pieces that all-reduces are cut into.

Lina, section 4: an all-to-all blocks the computation, an all-reduce of gradients hardly ever does. Sharing the network
slows the all-to-all down; putting it first does not help while a long all-reduce that cannot be pre-empted is under way.
So all-reduces are cut into micro-ops: a waiting all-to-all then waits for one micro-op at most, and every micro-op costs an
overhead of its own. The paper tries sizes (Figure 15).
"""

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.errors import InputError
from engine.result import Provenance, Result, Status, library_versions
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, Tasks, run_streams

POLICIES = ("priority", "fair", "fifo")
ROUND_OFF = 1e-9
MOST_PIECES = 100_000
"""More pieces are a mistake in the unit of the micro-op rather than a wish."""


@dataclass(frozen=True)
class NetworkSchedule:
    """The times of all operations, in seconds.

    alltoall: float64[all-to-all, 2], start and end, in the order given
    pieces: float64[piece, 2], start and end of the pieces of all all-reduces
    piece_of: int64[piece], their all-reduce
    waiting: float64[all-to-all], end - arrival - duration
    finish: end of the last operation, 0 without any
    """

    alltoall: NDArray[np.float64]
    pieces: NDArray[np.float64]
    piece_of: NDArray[np.int64]
    waiting: NDArray[np.float64]
    finish: float


def schedule_network(
    alltoall: ArrayLike, allreduce: ArrayLike, micro_op: float | None = None, overhead: float = 0.0, policy: str = "priority"
) -> Result[NetworkSchedule]:
    """Operations on one network under a policy of `engine.simulate.streams`; `objective` is the all-to-alls' total waiting.

    All-to-alls go in order of arrival, ties as given. `bound` is their waiting for each other with the network to
    themselves, which no schedule in that order can undercut; status OPTIMAL if it is met, else FEASIBLE.
    Raises InputError for a wrong shape, value or policy, and for more than MOST_PIECES pieces.

    alltoall, allreduce: float64[operation, 2], arrival and duration alone, in seconds
    micro_op: seconds; an all-reduce is cut into equal pieces of at most that, all there when it arrives; None: one piece
    overhead: seconds on the network that every piece takes in addition, also the only piece of an all-reduce
    policy: "priority", "fair" (each at half speed while both are there) or "fifo"
    """
    began = time.perf_counter()
    first, second = _operations(alltoall, "alltoall"), _operations(allreduce, "allreduce")
    if policy not in POLICIES:
        raise InputError(f"policy '{policy}': wanted one of {', '.join(POLICIES)}")
    if not (math.isfinite(overhead) and overhead >= 0):
        raise InputError(f"overhead: wanted seconds of at least 0, not {overhead:g}")
    solution = _run(first, second, _pieces(second[:, 1], micro_op), overhead, policy)
    objective, bound = float(solution.waiting.sum()), 0.0
    free = 0.0
    for arrival, duration in first[np.argsort(first[:, 0], kind="stable")].tolist():  # with nothing else on the network
        free = max(free, arrival) + duration
        bound += free - (arrival + duration)
    met = objective <= bound * (1 + ROUND_OFF)
    return Result(
        status=Status.OPTIMAL if met else Status.FEASIBLE,
        objective=objective,
        bound=min(bound, objective),
        runtime=time.perf_counter() - began,
        solution=solution,
        provenance=Provenance(optimiser="priority", options={"policy": policy}, versions=library_versions()),
    )


def _operations(rows: ArrayLike, name: str) -> NDArray[np.float64]:
    table = np.asarray(rows, dtype=np.float64)
    table = table.reshape(-1, 2) if not table.size else table
    if table.ndim != 2 or table.shape[1] != 2 or not np.isfinite(table).all() or table.min(initial=0) < 0:
        raise InputError(f"{name}: wanted rows [arrival, duration] of finite seconds of at least 0")
    return table


def _pieces(duration: NDArray[np.float64], micro_op: float | None) -> NDArray[np.int64]:
    """int64[all-reduce], the least number of equal pieces within the micro-op; sizes that differ by round-off are equal."""
    if micro_op is None:
        return np.ones(len(duration), dtype=np.int64)
    if not micro_op > 0:
        raise InputError(f"micro_op: wanted seconds above 0, not {micro_op:g}")
    with np.errstate(over="ignore"):
        parts = np.maximum(np.ceil(duration / micro_op - ROUND_OFF), 1)
    if parts.sum() > MOST_PIECES:
        raise InputError(
            f"micro_op: {micro_op:g} s cuts the all-reduces into {parts.sum():.3g} pieces; at most {MOST_PIECES} are "
            "simulated. Take larger micro-ops"
        )
    return parts.astype(np.int64)


def _run(
    alltoall: NDArray[np.float64], allreduce: NDArray[np.float64], pieces: NDArray[np.int64], overhead: float, policy: str
) -> NetworkSchedule:
    by_arrival = np.argsort(alltoall[:, 0], kind="stable")
    piece_of = np.repeat(np.arange(len(pieces)), pieces)
    stream = np.repeat([ALL_TO_ALL, ALL_REDUCE], [len(alltoall), len(piece_of)])
    seconds = np.r_[alltoall[by_arrival, 1], (allreduce[:, 1] / pieces + overhead)[piece_of]][:, None]
    release = np.r_[alltoall[by_arrival, 0], allreduce[piece_of, 0]]
    tasks = Tasks(stream, seconds, [], release, pair=np.full(len(stream), -1), holds=np.zeros(len(stream), dtype=bool))
    times = np.concatenate(run_streams(tasks, policy), axis=1)
    of_alltoall = np.empty_like(alltoall)
    of_alltoall[by_arrival] = times[: len(alltoall)]
    waiting = np.maximum(of_alltoall[:, 1] - alltoall.sum(axis=1), 0.0)
    finish = float(times[:, 1].max(initial=0.0))
    return NetworkSchedule(of_alltoall, times[len(alltoall) :], piece_of, waiting, finish)
