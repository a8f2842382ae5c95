"""The order in which one all-to-all sends its bytes (Aurora §4.2 and §5.2), at the bound of the chosen mode.

matched is preemptive open-shop scheduling: a phase is a matching of senders to receivers, and the busiest line (sender
or receiver) of the matrix of pair seconds is the makespan. The slack of a line is the time that it may still idle
before it becomes the busiest. Long phases are few phases, and two facts make them cheap to find:

* A matching allows a phase of length d when every line is busy for at least d minus its slack. Pair the idle senders
  with the idle receivers: the matching becomes a permutation M, and the condition becomes V[i, M(i)] >= d with
  V = time left + min(slack of sender, slack of receiver). One perfect matching on V stands for the two that cover the
  critical senders and the critical receivers (Mendelsohn and Dulmage), and the longest phase is a bottleneck
  assignment on V.
* Once several lines have no slack left, their transfers end at different times and every phase ends only one of them.
  So slack is worth saving, most of all the slack of lines that have little.

One linear assignment per phase serves both: a steep penalty on small V for the bottleneck, and a price on every second
of slack spent. It only steers the number of phases. The makespan is exact with any permutation of positive V, because
time is counted in whole units below 2**53, where float64 makes no error.

Lower bounds on the makespan of one all-to-all stand here too, and the orders that systems use without optimising: random
(RCS) and shortest job first (SJF), Aurora §8.1. In all functions traffic is float64[src, dst] in bytes (the diagonal is
ignored: those tokens stay on their GPU) and send, receive are float64[gpu] in bytes/s, one rate per direction. Start-up
latency is left out unless a bound says that it includes it.
"""

import time
from typing import Literal

import numpy as np

from engine.errors import InputError
from engine.network import Network, off_diagonal
from engine.plan import Schedule
from engine.result import Result, Status, Stop, never, result_of


def pair_seconds(traffic: np.ndarray, send: np.ndarray, receive: np.ndarray) -> np.ndarray:
    """float64[src, dst]: seconds of every transfer alone, at the slower of its two ends; 0 on the diagonal."""
    seconds = traffic / np.minimum(send[:, None], receive[None, :])
    np.fill_diagonal(seconds, 0.0)
    return seconds


def matched_bound(traffic: np.ndarray, send: np.ndarray, receive: np.ndarray) -> float:
    """Seconds of the busiest end when a GPU sends to one peer and receives from one peer at a time.

    The transfers of a line of `pair_seconds` share an end and can only follow one another. With preemption the bound
    is reached (Gonzalez and Sahni 1976; the pairwise form used in the proof of Aurora's Theorem 5.2).
    """
    seconds = pair_seconds(traffic, send, receive)
    return float(max(seconds.sum(axis=1).max(initial=0.0), seconds.sum(axis=0).max(initial=0.0)))


def shared_bound(traffic: np.ndarray, send: np.ndarray, receive: np.ndarray) -> float:
    """Seconds of the busiest end when a GPU serves any number of peers at once within its bandwidth.

    This is the formula that Aurora's Theorem 5.2 states. Never above `matched_bound`; equal to it when all rates are.
    """
    moved = off_diagonal(np.asarray(traffic, dtype=np.float64))
    return float(max((moved.sum(axis=1) / send).max(initial=0.0), (moved.sum(axis=0) / receive).max(initial=0.0)))


def meeting_bound(network: Network, traffic: np.ndarray) -> float:
    """Seconds below which no all-to-all of this traffic ends if all sends begin at once, one start-up included."""
    bound = network.bound(traffic)
    if not network.contended or not bound:
        return bound
    return max(bound, meeting_seconds(network, traffic) + network.least_start_up(network.moved(traffic)))


def meeting_seconds(network: Network, traffic: np.ndarray) -> float:
    """The same without start-ups.

    While k sends of a port are left it carries no more than k sends reach there. By the time m have ended at least the bytes
    of the m shortest have gone, so nothing is faster than one after another, the shortest first.
    """
    wanted = off_diagonal(traffic)
    left = np.arange(network.gpus, 0, -1)
    seconds = [0.0]
    for over_links, here in ((False, ~network.linked), (True, network.linked)):
        ascending = (np.sort(np.where(here, matrix, 0.0), axis=1) for matrix in (wanted, wanted.T))
        slower = [matrix @ (1 / network.reached(over_links, left)) for matrix in ascending]
        rates = (network.link, network.link) if over_links else (network.send, network.receive)
        seconds += [(moved[moved > 0] / rate[moved > 0]).max(initial=0.0) for moved, rate in zip(slower, rates, strict=True)]
    return float(max(seconds))


def pair_rate(network: Network) -> np.ndarray:
    """float64[src, dst] bytes/s of a pair that has its two ports for itself; 1 where there are none."""
    rate = np.where(network.linked, network.link[:, None], np.minimum(network.send[:, None], network.receive))
    return np.where(rate > 0, rate, 1.0)


def one_peer_bound(network: Network, traffic: np.ndarray) -> float:
    """Seconds below which no all-to-all ends with one peer at a time on each port, a start-up for every send included."""
    start_up = np.where(network.linked, network.link_latency[:, None], network.latency)
    wanted = off_diagonal(traffic)
    seconds = np.where(wanted > 0, wanted / pair_rate(network) + start_up, 0.0)
    lines = (np.where(here, seconds, 0.0).sum(axis=axis) for here in (network.linked, ~network.linked) for axis in (0, 1))
    return float(max(line.max(initial=0.0) for line in lines))


UNITS = 2.0**52
"""Time units in the bound of a matched order; rounding to whole units moves a transfer by 1e-16 of the bound."""

MEETS = 1e-9
"""A makespan this close to the bound, relatively, is optimal."""

Sends = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The sends of one phase as columns of equal length: int64 src, int64 dst, float64 time."""


def order(
    traffic: np.ndarray,
    send: np.ndarray,
    receive: np.ndarray,
    mode: Literal["matched", "shared"] = "matched",
    stop: Stop = never,
) -> Result[Schedule]:
    """A shortest order of one all-to-all.

    traffic: float64[src, dst] bytes, diagonal ignored
    send, receive: float64[gpu] bytes/s
    mode: "matched", each GPU sends to one peer and receives from one at a time, a pair at the slower of its two rates. The
        makespan is `matched_bound`, the phases are typically 1 to 3 per GPU and at most one per transfer and two per
        GPU. "shared", a GPU serves several peers at once within its bandwidth. All transfers at once, each at the
        constant rate bytes / T, keep every GPU within its bandwidth exactly when T >= `shared_bound`; one phase of that
        length is therefore optimal. The formula of Aurora's Theorem 5.2 is this fluid optimum (its proof is about
        matched).

    `objective` and `bound` are seconds without start-up latency. When `stop()` turns true the rest goes by rotation
    (GPU i to GPU i + k in phase k): legal, but longer, status CANCELLED. Raises InputError for shapes that do not fit
    together, traffic that is negative or not finite, and bandwidths that are not positive.
    """
    started = time.perf_counter()
    traffic, send, receive = checked_traffic(traffic, send, receive)
    if mode == "shared":
        bound = shared_bound(traffic, send, receive)
        src, dst = np.nonzero(traffic)
        duration = np.full(1 if len(src) else 0, bound)
        schedule = Schedule(src=src, dst=dst, bytes=traffic[src, dst], phase=np.zeros_like(src), duration=duration)
        status = Status.OPTIMAL
    elif mode == "matched":
        bound = matched_bound(traffic, send, receive)
        phases, stopped = _critical_steps(pair_seconds(traffic, send, receive), stop)
        schedule = matched_schedule(traffic, send, receive, phases)
        status = Status.CANCELLED if stopped else met(schedule.makespan, bound)
    else:
        raise InputError(f'mode must be "matched" or "shared", not {mode!r}')
    return result_of(f"order/{mode}", started, status, schedule.makespan, bound, schedule)


def checked_traffic(traffic: np.ndarray, send: np.ndarray, receive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three arrays of `order` as new float64 arrays, the diagonal of traffic set to 0; InputError names a fault."""
    try:
        traffic, send, receive = (np.array(array, dtype=np.float64) for array in (traffic, send, receive))
    except (TypeError, ValueError):
        raise InputError("traffic and bandwidths must be rectangular arrays of numbers") from None
    if traffic.ndim != 2 or traffic.shape[0] != traffic.shape[1]:
        raise InputError(f"traffic must be a square matrix, not of shape {traffic.shape}")
    np.fill_diagonal(traffic, 0.0)
    for fault, what in ((~np.isfinite(traffic), "not a finite number"), (traffic < 0, "negative")):
        if fault.any():
            i, j = np.argwhere(fault)[0]
            raise InputError(f"traffic[{i}][{j}] is {what} ({traffic[i, j]:g})")
    for name, rate in (("send", send), ("receive", receive)):
        if rate.shape != (len(traffic),):
            raise InputError(f"{name} must list one bandwidth for each of {len(traffic)} GPUs, not shape {rate.shape}")
        if (fault := ~(np.isfinite(rate) & (rate > 0))).any():
            gpu = int(np.argmax(fault))
            raise InputError(f"{name}[{gpu}] must be a positive bandwidth ({rate[gpu]:g})")
    with np.errstate(over="ignore"):
        bound = matched_bound(traffic, send, receive)
    if not np.isfinite(bound):
        raise InputError("traffic is too large for its bandwidths: the time to send it is not a finite number")
    return traffic, send, receive


def _critical_steps(seconds: np.ndarray, stop: Stop) -> tuple[list[Sends], bool]:
    """Phases as long in all as the largest line of `seconds` (float64[src, dst]), and True if `stop` cut them short.

    Every phase empties a transfer or uses up the slack of a line, so there are at most nonzeros + 2n of them.
    """
    n = len(seconds)
    bound = max(seconds.sum(axis=0).max(initial=0.0), seconds.sum(axis=1).max(initial=0.0))
    if bound == 0:
        return [], False
    whole = np.maximum(np.round(seconds * (UNITS / bound)), seconds > 0)
    rows = cols = np.arange(n)
    left, row_sum, col_sum = whole.copy(), whole.sum(axis=1), whole.sum(axis=0)
    makespan = max(row_sum.max(), col_sum.max())
    phases, stopped = [], False
    # Rounding makes line sums that should be equal differ by up to n / 2 units; such a rest is no traffic.
    while makespan > 2 * n and not (stopped := stop()):
        lines = max(np.count_nonzero(row_sum), np.count_nonzero(col_sum))
        if lines < len(left):  # finished lines take part in no phase, and the assignment is cubic
            keep_rows, keep_cols = (np.argsort(-sums, kind="stable")[:lines] for sums in (row_sum, col_sum))
            left, rows, cols = left[np.ix_(keep_rows, keep_cols)], rows[keep_rows], cols[keep_cols]
            row_sum, col_sum = row_sum[keep_rows], col_sum[keep_cols]
        column, step = _long_step(left, row_sum, col_sum, makespan)
        row = np.arange(lines)
        sent = np.minimum(left[row, column], step)
        left[row, column] -= sent
        row_sum -= sent
        col_sum[column] -= sent
        makespan -= step
        busy = sent > 0
        phases.append((rows[busy], cols[column[busy]], sent[busy]))
    rest = np.zeros_like(whole)
    rest[np.ix_(rows, cols)] = left
    if not stopped:
        rest[rest < whole] = 0.0  # residue of a transfer that has been sent
    return phases + rotation(rest), stopped


def _long_step(left: np.ndarray, row_sum: np.ndarray, col_sum: np.ndarray, makespan: float) -> tuple[np.ndarray, float]:
    """A permutation (int64[row] -> column) that allows a long phase at little cost of slack, and the phase's length.

    left: float64[row, column] whole units, with its line sums and the largest of them. The permutation pairs idle rows
    with idle columns.
    """
    from scipy.optimize import linear_sum_assignment

    lines = len(left)
    row_slack, col_slack = makespan - row_sum, makespan - col_sum
    allowed = np.minimum(row_slack[:, None], col_slack)
    allowed += left
    longest = min(allowed.max(axis=0).min(), allowed.max(axis=1).min())
    cost = longest / np.maximum(np.minimum(allowed, longest), 1.0)
    cost **= 2
    cost **= 2
    shortfall = np.maximum(longest - left, 0.0)
    shortfall *= 3 / longest
    row_price, col_price = ((longest / (longest + slack)) ** 2 for slack in (row_slack, col_slack))
    cost += shortfall * (row_price[:, None] + col_price)
    # By Hall's theorem some permutation stays at or above this floor: critical rows that reached fewer columns than
    # they are would have to squeeze their time, less `floor` for every small entry, into those columns. Dearer than any
    # such permutation, lower entries are never taken, so every step makes progress.
    floor = max(1.0, makespan / (lines + 1) ** 2)
    cost[allowed < floor] = 2 * lines * ((longest / floor) ** 4 + 6)
    # Subtracting the least of every row and column changes no optimum and makes the search several times faster.
    cost -= cost.min(axis=1, keepdims=True)
    cost -= cost.min(axis=0)
    column = linear_sum_assignment(cost)[1]
    return column, float(allowed[np.arange(lines), column].min())


def rotation(time_left: np.ndarray) -> list[Sends]:
    """Phases in which GPU i sends all of time_left[i, i + k] (float64[src, dst], any unit), for k = 1 … n - 1."""
    src = np.arange(len(time_left))
    phases = []
    for shift in range(1, len(time_left)):
        dst = (src + shift) % len(time_left)
        amount = time_left[src, dst]
        if (busy := amount > 0).any():
            phases.append((src[busy], dst[busy], amount[busy]))
    return phases


def matched_schedule(traffic: np.ndarray, send: np.ndarray, receive: np.ndarray, phases: list[Sends]) -> Schedule:
    """The schedule of phases that are matchings and together send every transfer.

    Times in `phases` only say how each transfer is divided over its sends, so rounded ones still deliver every byte.
    A phase lasts as long as its longest send at the slower of the two ends' rates.
    """
    if not phases:
        return Schedule()
    src, dst, part = (np.concatenate(columns) for columns in zip(*phases, strict=True))
    sizes = [len(sends[0]) for sends in phases]
    total = np.zeros_like(traffic)
    np.add.at(total, (src, dst), part)
    volume = traffic[src, dst] * (part / total[src, dst])
    first = np.cumsum([0, *sizes[:-1]])
    duration = np.maximum.reduceat(volume / np.minimum(send[src], receive[dst]), first)
    phase = np.repeat(np.arange(len(sizes)), sizes)
    return Schedule(src=src, dst=dst, bytes=volume, phase=phase, duration=duration)


def met(makespan: float, bound: float) -> Status:
    """OPTIMAL when the makespan is the bound to within rounding, else FEASIBLE."""
    return Status.OPTIMAL if makespan <= bound * (1 + MEETS) else Status.FEASIBLE


def random_order(traffic: np.ndarray, seed: int) -> Schedule:
    """RCS: every sender works through its peers in a random order. traffic: float64[src, dst] bytes."""
    keys = np.random.default_rng(seed).random(traffic.shape)
    return _by_key(traffic, keys)


def shortest_first(traffic: np.ndarray) -> Schedule:
    """SJF: every sender serves the peer with the fewest bytes first. traffic: float64[src, dst] bytes."""
    return _by_key(traffic, traffic)


def _by_key(traffic: np.ndarray, key: np.ndarray) -> Schedule:
    src, dst = np.nonzero(np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic))
    order = np.lexsort((dst, key[src, dst], src))
    src, dst = src[order], dst[order]
    return Schedule(src=src, dst=dst, bytes=traffic[src, dst], phase=np.zeros(len(src), dtype=np.int64))
