"""One training step as tasks on streams: every group of alike GPUs computes in program order, and all groups share one
network, on which all-to-alls and all-reduces get in each other's way (Lina, sections 2.2 and 4). Copies from the host's memory
and to it run meanwhile, one after another in each direction, and the host's own work.

All GPUs of a group do the same at the same time. A collective takes part on every group: it is ready when all tasks that it
waits for are over everywhere, and it ends everywhere at once. The policy decides the order on the network:

* "fair": an all-to-all and an all-reduce may be in flight together and then share the network (the paper's baseline:
  two CUDA streams that know nothing of each other).
* "priority": one collective at a time, never pre-empted. A ready all-to-all goes first; an all-reduce starts only if
  none is ready and no group runs a task that `holds` (Lina, sections 4.2 and 6.1).
* "fifo": one collective at a time, in the order in which they become ready.
* "fixed": sharing as in "fair", but an all-reduce starts only while no pair of all-to-alls is open (section 7.2.2).

All-to-alls go in program order among the ready ones (under "fifo" in order of readiness), all-reduces in the order in
which they become ready; ties go to the lower index. At one instant computations start before all-to-alls and these
before all-reduces: a task that holds an all-reduce back does so from its very start.
"""

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError

COMPUTE, ALL_TO_ALL, ALL_REDUCE, HOST_IN, HOST_OUT, HOST_WORK = range(6)
LOCAL = (COMPUTE, HOST_IN, HOST_OUT, HOST_WORK)
"""Streams of a group's own; each runs its tasks in program order. The others share the network."""
POLICIES = ("fair", "priority", "fifo", "fixed")
NAMED_IN_ERRORS = 5


@dataclass(frozen=True)
class Tasks:
    """The tasks of one step in program order.

    stream: int8[task], COMPUTE, ALL_TO_ALL, ALL_REDUCE, HOST_IN, HOST_OUT or HOST_WORK.
    seconds: float64[task, group], at least 0; of a collective its time with the network to itself, equal over groups.
    edges: int64[edge, 2], (before, after): what is not a collective waits on its own group only for what is none.
    release: float64[task] seconds, the earliest start, at least 0.
    pair: int64[task], the pair (dispatch and combine of one layer and direction) of an all-to-all; -1 otherwise. An
        all-to-all with -1 is a pair by itself.
    holds: bool[task], computations during which "priority" starts no all-reduce: they announce an all-to-all.

    Raises InputError if a shape or a value is wrong.
    """

    stream: NDArray[np.int8]
    seconds: NDArray[np.float64]
    edges: NDArray[np.int64]
    release: NDArray[np.float64]
    pair: NDArray[np.int64]
    holds: NDArray[np.bool_]

    def __post_init__(self) -> None:
        kinds = {"stream": np.int8, "seconds": float, "edges": np.int64, "release": float, "pair": np.int64}
        for name, kind in (kinds | {"holds": np.bool_}).items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=kind))
        if not self.edges.size:
            object.__setattr__(self, "edges", np.zeros((0, 2), dtype=np.int64))
        count = len(self.stream)
        if self.seconds.ndim != 2 or len(self.seconds) != count or not self.seconds.shape[1]:
            raise InputError(f"seconds: shape {self.seconds.shape}; wanted [task, group] for {count} tasks")
        for name in ("stream", "release", "pair", "holds"):
            if getattr(self, name).shape != (count,):
                raise InputError(f"{name}: shape {getattr(self, name).shape}; wanted one value for each of {count} tasks")
        for name in ("seconds", "release"):
            if not (np.isfinite(getattr(self, name)) & (getattr(self, name) >= 0)).all():
                raise InputError(f"{name}: every value must be finite and at least 0")
        if not np.isin(self.stream, range(6)).all():
            raise InputError(
                f"stream: wanted {COMPUTE} (compute), {ALL_TO_ALL} (all-to-all), {ALL_REDUCE} (all-reduce), {HOST_IN} and "
                f"{HOST_OUT} (copies from and to the host) or {HOST_WORK} (the host's own work)"
            )
        uneven = np.flatnonzero((self.seconds != self.seconds[:, :1]).any(axis=1) & ~np.isin(self.stream, LOCAL))
        if len(uneven):
            raise InputError(f"seconds of task {uneven[0]}: a collective takes the same time on all groups")
        if self.edges.shape[1:] != (2,) or ((self.edges < 0) | (self.edges >= count)).any():
            raise InputError(f"edges: wanted pairs [before, after] of task indices from 0 to {count - 1}")
        if self.pair.min(initial=0) < -1 or (self.pair[self.stream != ALL_TO_ALL] != -1).any():
            raise InputError("pair: wanted -1, or for an all-to-all the index of its pair")
        if self.holds[self.stream != COMPUTE].any():
            raise InputError("holds: only a computation can hold all-reduces back")


def run_streams(
    tasks: Tasks, policy: str, use: tuple[float, float] = (1.0, 1.0), together: tuple[float, float] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(start, end) of every task on every group, float64[task, group] seconds.

    Raises InputError for an unknown policy, shares out of range, and tasks that wait for each other.

    policy: one of POLICIES (see the top of this file)
    use: the share of the network that an all-to-all has when alone, and that of an all-reduce, each in (0, 1]. While both are
        in flight they share max-min fairly: half each, and the rest of one's half the other may take; (1, 1) runs both at
        half speed
    together: speeds of an all-to-all and an all-reduce in flight together, relative to each alone, where they were measured;
        None: those of `use`
    """
    if policy not in POLICIES:
        raise InputError(f"policy '{policy}': wanted one of {', '.join(POLICIES)}")
    if not all(0 < share <= 1 for share in use):
        raise InputError(f"use {tuple(use)}: the shares of the network must be above 0 and at most 1")
    if together is not None and not all(0 < rate <= 1 for rate in together):
        raise InputError(f"together {tuple(together)}: the speeds must be above 0 and at most 1")
    run = _Run(tasks, policy, shared_rates(use) if together is None else together)
    run.to_the_end()
    return run.start, run.end


def shared_rates(use: tuple[float, float]) -> tuple[float, float]:
    """Speeds of an all-to-all and an all-reduce in flight together, relative to each alone: max-min fair shares."""
    alltoall, allreduce = use
    return min(1.0, max(0.5, 1 - allreduce) / alltoall), min(1.0, max(0.5, 1 - alltoall) / allreduce)


@dataclass
class _Flight:
    """A collective on the network: from `since` on it works off `left` seconds at `rate`."""

    task: int
    left: float
    since: float
    rate: float = 1.0

    @property
    def finish(self) -> float:
        return self.since + self.left / self.rate


class _Run:
    """The state of one execution. Only the network needs a clock: computations run in program order in any case, so their
    times are known, even ahead of the clock, as soon as those of the tasks that they wait for are."""

    def __init__(self, tasks: Tasks, policy: str, together: tuple[float, float]) -> None:
        count, groups = tasks.seconds.shape
        self.tasks, self.policy = tasks, policy
        self.together = dict(zip((ALL_TO_ALL, ALL_REDUCE), together, strict=True))
        self.stream, self.pair = tasks.stream.tolist(), tasks.pair.tolist()
        self.after: list[list[int]] = [[] for _ in range(count)]
        for before, after in tasks.edges.tolist():
            self.after[before].append(after)
        self.missing = np.bincount(tasks.edges[:, 1], minlength=count).tolist()
        self.ready = np.repeat(tasks.release[:, None], groups, axis=1)
        self.start, self.end = np.zeros((count, groups)), np.zeros((count, groups))
        lines = {stream: [task for task in range(count) if self.stream[task] == stream] for stream in LOCAL}
        self.lines = {stream: line for stream, line in lines.items() if line}
        self.done = dict.fromkeys(self.lines, 0)
        self.free = {stream: np.zeros(groups) for stream in self.lines}
        self.clock = 0.0
        self.coming: list[tuple[float, int]] = []
        self.waiting: dict[int, list[tuple[float, int]]] = {ALL_TO_ALL: [], ALL_REDUCE: []}
        self.flying: dict[int, _Flight] = {}
        self.landed = 0
        self.coming_holds: list[tuple[float, float]] = []
        self.held_until = 0.0
        self.left_of_pair = Counter(pair for pair in self.pair if pair >= 0)  # 0 for -1: open no longer than in flight
        self.open_pairs: set[int] = set()

    def to_the_end(self) -> None:
        for task, stream in enumerate(self.stream):
            if stream not in LOCAL and not self.missing[task]:
                heapq.heappush(self.coming, (float(self.ready[task, 0]), task))
        self._compute()
        while True:
            self._look_round()
            kind = self._choice()
            if kind is not None:
                self._launch(kind)
                continue
            times = [flight.finish for flight in self.flying.values()] + [ready for ready, _ in self.coming[:1]]
            if self._held and self.waiting[ALL_REDUCE]:
                times.append(self.held_until)
            if not times:
                break
            self.clock = min(times)
            for kind in [kind for kind, flight in self.flying.items() if flight.finish <= self.clock]:
                self._land(kind)
        if sum(self.done.values()) + self.landed < len(self.stream):
            raise InputError(self._deadlock())

    def _resolve(self, task: int) -> None:
        """Tell the tasks that wait for `task` when it ended."""
        end = self.end[task]
        for after in self.after[task]:
            np.maximum(self.ready[after], end, out=self.ready[after])
            self.missing[after] -= 1
            if not self.missing[after] and self.stream[after] not in LOCAL:
                heapq.heappush(self.coming, (float(self.ready[after].max()), after))

    def _compute(self) -> None:
        """Run the computations, in program order, up to the first that waits for a collective still to come; copies alike,
        until neither goes on."""
        ran = True
        while ran:
            ran = False
            for stream, line in self.lines.items():
                while self.done[stream] < len(line) and not self.missing[task := line[self.done[stream]]]:
                    np.maximum(self.ready[task], self.free[stream], out=self.start[task])
                    np.add(self.start[task], self.tasks.seconds[task], out=self.end[task])
                    self.free[stream] = self.end[task]
                    self.done[stream] += 1
                    if self.tasks.holds[task]:
                        for span in zip(self.start[task].tolist(), self.end[task].tolist(), strict=True):
                            heapq.heappush(self.coming_holds, span)
                    self._resolve(task)
                    ran = len(self.lines) > 1

    def _look_round(self) -> None:
        """Queue the collectives that are ready by now, and see until when all-reduces are held back."""
        while self.coming and self.coming[0][0] <= self.clock:
            ready, task = heapq.heappop(self.coming)
            in_program_order = self.stream[task] == ALL_TO_ALL and self.policy != "fifo"
            heapq.heappush(self.waiting[self.stream[task]], (0.0 if in_program_order else ready, task))
        while self.coming_holds and self.coming_holds[0][0] <= self.clock:
            self.held_until = max(self.held_until, heapq.heappop(self.coming_holds)[1])

    @property
    def _held(self) -> bool:
        return self.clock < self.held_until

    def _choice(self) -> int | None:
        """The class with a first waiting collective that starts now, if there is one."""
        kinds = [kind for kind in (ALL_TO_ALL, ALL_REDUCE) if self.waiting[kind]]
        if self.policy in ("priority", "fifo"):
            if self.flying or not kinds:
                return None
            if self.policy == "fifo":
                return min(kinds, key=lambda kind: self.waiting[kind][0])
            return None if kinds[0] == ALL_REDUCE and self._held else kinds[0]
        for kind in kinds:
            barred = kind == ALL_REDUCE and self.policy == "fixed" and self.open_pairs
            if kind not in self.flying and not barred:
                return kind
        return None

    def _launch(self, kind: int) -> None:
        _, task = heapq.heappop(self.waiting[kind])
        self.start[task] = self.clock
        self.flying[kind] = _Flight(task, float(self.tasks.seconds[task, 0]), self.clock)
        self._set_rates()
        if kind == ALL_TO_ALL:
            self.open_pairs.add(self.pair[task])

    def _land(self, kind: int) -> None:
        task = self.flying.pop(kind).task
        self.end[task] = self.clock
        self.landed += 1
        self._set_rates()
        if kind == ALL_TO_ALL:
            pair = self.pair[task]
            self.left_of_pair[pair] -= pair >= 0
            if not self.left_of_pair[pair]:
                self.open_pairs.remove(pair)
        self._resolve(task)
        self._compute()

    def _set_rates(self) -> None:
        """Work is booked only where a rate changes: a collective that never shares ends at start + seconds exactly."""
        for kind, flight in self.flying.items():
            rate = self.together[kind] if len(self.flying) > 1 else 1.0
            if rate != flight.rate:
                flight.left = max(0.0, flight.left - (self.clock - flight.since) * flight.rate)
                flight.since, flight.rate = self.clock, rate

    def _deadlock(self) -> str:
        """Why some tasks never ran."""
        if self.waiting[ALL_REDUCE]:
            task, pair = self.waiting[ALL_REDUCE][0][1], min(self.open_pairs)
            return f"task {task}: policy 'fixed' defers this all-reduce to the end of pair {pair}, which never comes"
        stuck = {task for stream, line in self.lines.items() for task in line[self.done[stream] :]}
        stuck |= {task for task, missing in enumerate(self.missing) if missing}
        named = ", ".join(str(task) for task in sorted(stuck)[:NAMED_IN_ERRORS])
        more = f" and {len(stuck) - NAMED_IN_ERRORS} more" if len(stuck) > NAMED_IN_ERRORS else ""
        return f"edges: tasks {named}{more} wait for each other; computations also wait for those before them in the list"
