"""Experts on the GPUs of a mixed cluster, one expert to a GPU: exact.

Aurora section 5.1. With barriers between the steps of a layer its time is a constant plus max F + 2 max N (equation 3),
where F is a GPU's expert computation and N its share of one all-to-all. The paper sorts experts by tokens and GPUs by
speed (Theorem 5.1), which is optimal only while one number per expert decides both F and N. Tokens start on fixed GPUs,
so N depends on the pair, and the exact answer is a bottleneck assignment (a perfect matching of rows to columns with the
least largest weight, by threshold search) under the best threshold on F.
"""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.errors import InputError
from engine.result import Floats, Ints, Result, Status, Stop, never, result_of


@dataclass(frozen=True)
class AssignmentInstance:
    """One MoE layer with experts to be assigned to GPUs; all times in seconds, all arrays finite.

    compute: float64[gpu, expert], computation the GPU needs for the expert's tokens, at least 0
    receive: float64[gpu, expert], receiving the expert adds to the GPU in one all-to-all, at least 0
    send_total: float64[gpu], sending of the GPU if it keeps no token
    send_saved: float64[gpu, expert], sending the GPU saves if the expert lives on it, at least 0

    Raises InputError if a shape or a value is wrong.
    """

    compute: Floats
    receive: Floats
    send_total: Floats
    send_saved: Floats

    def __post_init__(self) -> None:
        for name in ("compute", "receive", "send_saved", "send_total"):
            value = np.asarray(getattr(self, name), dtype=np.float64)
            object.__setattr__(self, name, value)
            wanted = self.compute.shape[:1] if name == "send_total" else self.compute.shape
            if self.compute.ndim != 2 or self.compute.size == 0 or value.shape != wanted:
                raise InputError(f"{name}: shape {value.shape}; wanted [gpu, expert], for send_total [gpu], none empty")
            if not np.isfinite(value).all() or value.min() < 0:
                raise InputError(f"{name}: every value must be finite and at least 0")

    @classmethod
    def from_tokens(
        cls, tokens: Floats, compute: Floats, send_bandwidth: Floats, receive_bandwidth: Floats
    ) -> "AssignmentInstance":
        """The instance of a routing.

        tokens: float64[source gpu, expert], tokens or bytes that start on a GPU and go to an expert
        compute: float64[gpu, expert] seconds
        send_bandwidth, receive_bandwidth: float64[gpu], in the unit of `tokens` per second, positive
        """
        tokens = np.asarray(tokens, dtype=np.float64)
        if tokens.ndim != 2 or tokens.size == 0 or not np.isfinite(tokens).all() or tokens.min() < 0:
            raise InputError("tokens: wanted a table [source gpu, expert] of finite values of at least 0")
        rates = {"send_bandwidth": send_bandwidth, "receive_bandwidth": receive_bandwidth}
        for name, rate in rates.items():
            rates[name] = rate = np.asarray(rate, dtype=np.float64)
            if rate.shape != tokens.shape[:1] or not np.isfinite(rate).all() or rate.min() <= 0:
                raise InputError(f"{name}: wanted one positive value for each of the {len(tokens)} GPUs")
        sent, received = rates["send_bandwidth"], rates["receive_bandwidth"]
        saved = tokens / sent[:, None]
        return cls(compute, _of_others(tokens, 0) / received[:, None], saved.sum(axis=1), saved)

    @property
    def gpus(self) -> int:
        return self.compute.shape[0]

    @property
    def experts(self) -> int:
        return self.compute.shape[1]

    def network(self) -> Floats:
        """float64[gpu, expert] seconds of one all-to-all on the GPU if the expert is its only one."""
        return np.maximum(self._never_saved[:, None] + _of_others(self.send_saved, 1), self.receive)

    @cached_property
    def _never_saved(self) -> Floats:
        """float64[gpu] seconds in which a GPU sends wherever the experts live."""
        return np.maximum(self.send_total - self.send_saved.sum(axis=1), 0.0)

    def cost(self, gpu_of_expert: Ints) -> float:
        """max F + 2 max N in seconds of any assignment int64[expert], with any number of experts on a GPU."""
        expert = np.arange(self.experts)

        def per_gpu(seconds: Floats) -> Floats:
            return np.bincount(gpu_of_expert, weights=seconds[gpu_of_expert, expert], minlength=self.gpus)

        leaving = self.send_saved.copy()
        leaving[gpu_of_expert, expert] = 0.0
        network = np.maximum(self._never_saved + leaving.sum(axis=1), per_gpu(self.receive))
        return float(per_gpu(self.compute).max() + 2 * network.max())


def _of_others(values: Floats, axis: int) -> Floats:
    """The sum along an axis without each value itself. A difference would lose small values next to large ones."""
    values = np.moveaxis(values, axis, 0)
    others = np.zeros_like(values)
    others[1:] = np.cumsum(values[:-1], axis=0)
    others[:-1] += np.cumsum(values[:0:-1], axis=0)[::-1]
    return np.moveaxis(others, 0, axis)


def assign(instance: AssignmentInstance, stop: Stop = never) -> Result[Ints]:
    """One expert to each GPU so that max F + 2 max N is least, proven; `solution` is gpu_of_expert int64[expert].

    A box is a range of thresholds on F times a range of thresholds on N that may still hold a better answer. The box with the
    lowest corner is split at its middle F threshold, where the least possible N is found by bisection over matchings; the parts
    that this point dominates or proves infeasible leave the search. Boxes are few, for the least N falls as F rises.

    Raises InputError unless there are as many experts as GPUs. When `stop` answers True the status is CANCELLED and the
    answer legal, with the bound proven so far.
    """
    start = time.perf_counter()
    if instance.gpus != instance.experts:
        raise InputError(f"{instance.experts} experts on {instance.gpus} GPUs: one expert to a GPU needs equal numbers of both")
    search = _BoxSearch(instance, stop)
    try:
        search.run()
        status = Status.OPTIMAL
    except _Cancelled:
        status = Status.CANCELLED
    return result_of("assign", start, status, search.objective, min(search.bound, search.objective), search.best)


class _BoxSearch:
    """The best assignment so far, and the boxes of thresholds that may still hold a better one.

    best: int64[expert], gpu_of_expert
    objective: its max F + 2 max N
    bound: proven lower limit of every assignment
    """

    def __init__(self, instance: AssignmentInstance, stop: Stop) -> None:
        self.instance, self.stop = instance, stop
        self.network = instance.network()
        self.matching = Matching(instance.compute, self.network, stop)
        self.best = np.arange(instance.gpus)
        self.objective, self.bound = instance.cost(self.best), 0.0

    def feasible(self, f: float, n: float) -> bool:
        """True if some assignment keeps to both thresholds; it is kept if it is the best. Raises _Cancelled."""
        fits = None if self.stop() else self.matching.fit(f, n)
        if fits is None:
            raise _Cancelled
        if not fits:
            return False
        gpu_of_expert = np.array(self.matching.gpu_of_expert)
        cost = self.instance.cost(gpu_of_expert)
        if cost < self.objective:
            self.best, self.objective = gpu_of_expert, cost
        return True

    def run(self) -> None:
        """Split boxes until none can hold a better answer: then `bound` is `objective`. Raises _Cancelled."""
        f_values, n_values = candidates(self.instance.compute), candidates(self.network)
        self.bound = float(f_values[0] + 2 * n_values[0])
        f_values = f_values[least(f_values, 0, len(f_values) - 1, lambda f: self.feasible(f, np.inf)) :]
        n_values = n_values[least(n_values, 0, len(n_values) - 1, lambda n: self.feasible(np.inf, n)) :]
        # A heap of (corner, first and last index of F, first and last index of N).
        boxes = [(float(f_values[0] + 2 * n_values[0]), 0, len(f_values) - 1, 0, len(n_values) - 1)]
        while boxes and boxes[0][0] < self.objective:
            self.bound, f_low, f_high, n_low, n_high = boxes[0]
            f_high = min(f_high, int(np.searchsorted(f_values + 2 * n_values[n_low], self.objective)) - 1)
            n_high = min(n_high, int(np.searchsorted(f_values[f_low] + 2 * n_values, self.objective)) - 1)
            f_mid = (f_low + f_high) // 2
            f, n = f_mid, least(n_values, n_low, n_high + 1, lambda n, f=f_values[f_mid]: self.feasible(f, n))
            if n <= n_high:
                f = least(f_values, f_low, f_mid, lambda f, n=n_values[n]: self.feasible(f, n))
            # The box stays on the heap until it is split, so that a cancelled search still has its bound.
            heapq.heappop(boxes)
            if f_low < f and n < n_high:
                corner = float(f_values[f_low] + 2 * n_values[n + 1])
                heapq.heappush(boxes, (corner, f_low, f - 1, n + 1, n_high))
            if f_mid < f_high and n_low < n:
                corner = float(f_values[f_mid + 1] + 2 * n_values[n_low])
                heapq.heappush(boxes, (corner, f_mid + 1, f_high, n_low, n - 1))
        self.bound = self.objective


class _Cancelled(Exception):  # noqa: N818 - not an error
    """`stop` answered True."""


def candidates(seconds: Floats) -> Floats:
    """The values a bottleneck can have, rising: none below the least that some GPU or some expert cannot avoid."""
    unavoidable = max(seconds.min(axis=0).max(), seconds.min(axis=1).max())
    return np.unique(seconds[seconds >= unavoidable])


def least(values: Floats, low: int, high: int, feasible: Callable[[float], bool]) -> int:
    """Least index in low..high of a feasible value; `high` is returned untested if no lower one is."""
    while low < high:
        middle = (low + high) // 2
        if feasible(values[middle]):
            high = middle
        else:
            low = middle + 1
    return low


class Matching:
    """Perfect matchings of GPUs to experts under two thresholds, each test starting from the last one's matching.

    Rows of the bipartite graph are Python integers, one bit an expert: an augmenting path visits an expert in under a
    microsecond, and neighbouring thresholds need only a few paths. `stop` is asked before each of them.
    """

    def __init__(self, compute: Floats, network: Floats, stop: Stop = never) -> None:
        self.compute = compute
        self.network = network
        self.stop = stop
        self.size = len(compute)
        self.expert_of_gpu = [-1] * self.size
        self.gpu_of_expert = [-1] * self.size

    def fit(self, f: float, n: float) -> bool | None:
        """True if there is a perfect matching with F <= f and N <= n on every GPU, which is then in `gpu_of_expert`; None if
        `stop` answered True before that was known."""
        allowed = np.packbits((self.compute <= f) & (self.network <= n), axis=1, bitorder="little")
        width, packed = allowed.shape[1], allowed.tobytes()
        rows = [int.from_bytes(packed[i : i + width], "little") for i in range(0, len(packed), width)]
        if not all(rows):
            return False
        free = (1 << self.size) - 1
        unmatched = []
        for gpu, expert in enumerate(self.expert_of_gpu):
            if expert >= 0 and rows[gpu] >> expert & 1:
                free ^= 1 << expert
                continue
            unmatched.append(gpu)
            if expert >= 0:
                self.expert_of_gpu[gpu] = self.gpu_of_expert[expert] = -1
        for gpu in unmatched:
            if self.stop():
                return None
            # A GPU without an augmenting path now has none later either (Berge), so one failure settles it.
            expert = self._augment(gpu, rows, free)
            if expert < 0:
                return False
            free ^= 1 << expert
        return True

    def _augment(self, root: int, rows: list[int], free: int) -> int:
        """Match the GPU `root` along a shortest augmenting path; the free expert at its end, or -1 if there is none."""
        unseen = (1 << self.size) - 1
        gpu_before = {}
        queue = [root]
        for gpu in queue:
            fresh = rows[gpu] & unseen
            if fresh & free:
                expert = end = (fresh & free & -(fresh & free)).bit_length() - 1
                while True:
                    before = self.expert_of_gpu[gpu]
                    self.expert_of_gpu[gpu], self.gpu_of_expert[expert] = expert, gpu
                    if gpu == root:
                        return end
                    expert, gpu = before, gpu_before[before]
            unseen ^= fresh
            while fresh:
                lowest = fresh & -fresh
                fresh ^= lowest
                expert = lowest.bit_length() - 1
                gpu_before[expert] = gpu
                queue.append(self.gpu_of_expert[expert])
        return -1


def bottleneck_assignment(weight: Floats, known: Ints, stop: Stop = never) -> tuple[Ints, float]:
    """column_of_row int64[row] with the least largest weight, and a proven lower bound of that weight.

    The bound equals the answer's largest weight unless `stop` answered True.

    weight: float64[row, column], square and finite
    known: int64[row], a perfect matching to start from, which is also the answer unless there is a better one
    """
    rows = np.arange(len(weight))
    best = np.asarray(known, dtype=np.int64)
    most = float(weight[rows, best].max())
    unavoidable = max(weight.min(axis=0).max(), weight.min(axis=1).max())
    values = np.unique(weight[(weight >= unavoidable) & (weight < most)])
    matching = Matching(weight, weight, stop)
    matching.expert_of_gpu, matching.gpu_of_expert = best.tolist(), np.argsort(best).tolist()
    # No matching stays below values[low], one stays within values[high] (`most` beyond the end). Whether there is
    # anything better at all is asked first: in a local search there seldom is.
    low, high = 0, len(values)
    middle = high - 1
    while low < high and not stop():
        fits = matching.fit(values[middle], values[middle])
        if fits is None:
            break
        if fits:
            best = np.array(matching.expert_of_gpu)
            high = int(np.searchsorted(values, weight[rows, best].max()))
        else:
            low = middle + 1
        middle = (low + high) // 2
    return best, float(values[low]) if low < len(values) else most


def with_slack(weight: Floats, most: float) -> Ints:
    """column_of_row int64[row] of the least sum of weights among the perfect matchings without a weight above `most`.

    There must be such a matching. Every row with a smaller weight gains slack under the bottleneck.
    """
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(np.where(weight <= most, weight, np.inf))[1].astype(np.int64)
