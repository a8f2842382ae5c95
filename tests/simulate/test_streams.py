"""Tasks on streams: against a naive simulation tick by tick, against the rules, by hand, and under changes without effect."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError, InputError
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, COMPUTE, POLICIES, Tasks, run_streams, shared_rates
from tests.cases.examples import tried
from tests.oracles.streams import check_streams

MOST_COLLECTIVES = 4
EXCLUSIVE = ("priority", "fifo")


def step(*rows: dict, groups: int = 1) -> Tasks:
    """Tasks from rows with `stream` and `seconds` and, where they matter, after, release, pair and holds."""
    return Tasks(
        stream=[row["stream"] for row in rows],
        seconds=np.array([np.broadcast_to(row["seconds"], groups) for row in rows], dtype=float).reshape(-1, groups),
        edges=[(before, after) for after, row in enumerate(rows) for before in row.get("after", ())],
        release=[row.get("release", 0.0) for row in rows],
        pair=[row.get("pair", -1) for row in rows],
        holds=[row.get("holds", False) for row in rows],
    )


def row(stream: int, seconds, **more) -> dict:
    return {"stream": stream, "seconds": seconds, **more}


compute, alltoall, allreduce = (partial(row, stream) for stream in (COMPUTE, ALL_TO_ALL, ALL_REDUCE))


def times(tasks: Tasks, policy: str, use=(1.0, 1.0)) -> list[tuple[float, float]]:
    """(start, end) of every task on the first group."""
    start, end = run_streams(tasks, policy, use)
    check_streams(tasks, policy, use, start, end)
    return list(zip(start[:, 0].tolist(), end[:, 0].tolist(), strict=True))


@st.composite
def steps(draw, whole: bool = True, groups: int = 2) -> Tasks:
    """Random acyclic steps with many ties (whole) or none (not whole)."""
    kinds = draw(st.lists(st.sampled_from((COMPUTE, COMPUTE, ALL_TO_ALL, ALL_REDUCE)), min_size=1, max_size=9))
    duration = st.integers(0, 3).map(float) if whole else st.floats(0.01, 3)
    rows, collectives = [], 0
    for index, kind in enumerate(kinds):
        collectives += kind != COMPUTE
        kind = kind if collectives <= MOST_COLLECTIVES else COMPUTE
        row = {"stream": kind, "after": draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else ()}
        row["release"] = draw(st.sampled_from((0.0, 0.0, 1.0, 4.0)))
        row["seconds"] = draw(st.tuples(*[duration] * groups)) if kind == COMPUTE else draw(duration)
        row["holds"] = kind == COMPUTE and draw(st.booleans())
        row["pair"] = draw(st.integers(-1, 1)) if kind == ALL_TO_ALL else -1
        rows.append(row)
    return step(*rows, groups=groups)


class Ticks:
    """The same step tick by tick: at every tick everything that may start does, then all in flight works for a tick.

    With whole seconds and half speeds, a tick of 2**-collectives meets every event exactly.
    """

    def __init__(self, tasks: Tasks, policy: str):
        self.tasks, self.policy, self.now = tasks, policy, 0.0
        self.count, self.groups = tasks.seconds.shape
        self.tick = 1.0 if policy in EXCLUSIVE else 2.0**-MOST_COLLECTIVES
        self.left = tasks.seconds.copy()
        self.start = np.full(tasks.seconds.shape, np.inf)
        self.end = np.full(tasks.seconds.shape, np.inf)
        self.ready_at = {}

    def ready(self, task: int, group: int) -> bool:
        if self.tasks.release[task] > self.now:
            return False
        for before, after in self.tasks.edges:
            local = self.tasks.stream[task] == self.tasks.stream[before] == COMPUTE
            over = self.end[before, group] if local else self.end[before].max()
            if after == task and over > self.now:
                return False
        return True

    def in_flight(self, kind: int) -> list[int]:
        every = range(self.count)
        return [i for i in every if self.tasks.stream[i] == kind and self.start[i, 0] <= self.now < self.end[i, 0]]

    def settle(self) -> bool:
        """End the tasks without work left and start computations; True if anything happened."""
        running = (self.start <= self.now) & (self.end == np.inf)
        over = running & (self.left == 0)
        self.end[over] = self.now
        happened = over.any()
        for group in range(self.groups):
            for task in np.flatnonzero(self.tasks.stream == COMPUTE):
                if self.end[task, group] < np.inf:
                    continue
                if self.start[task, group] == np.inf and self.ready(task, group):
                    self.start[task, group], happened = self.now, True
                break
        return bool(happened)

    def launch(self) -> bool:
        """Start at most one collective of a class; whether one was."""
        stream, waiting = self.tasks.stream, {ALL_TO_ALL: [], ALL_REDUCE: []}
        for task in np.flatnonzero(stream != COMPUTE).tolist():
            if self.start[task, 0] == np.inf and all(self.ready(task, group) for group in range(self.groups)):
                waiting[int(stream[task])].append((self.ready_at.setdefault(task, self.now), task))
        waiting[ALL_REDUCE].sort()
        if self.policy == "fifo":
            waiting = {ALL_TO_ALL: sorted(waiting[ALL_TO_ALL] + waiting[ALL_REDUCE])}
        launched = False
        for kind, queue in waiting.items():
            flying = self.in_flight(kind)
            if self.policy in EXCLUSIVE:
                flying = self.in_flight(ALL_TO_ALL) + self.in_flight(ALL_REDUCE)
            if not queue or flying or (kind == ALL_REDUCE and self.barred()):
                continue
            self.start[queue[0][1]], launched = self.now, True
        return launched

    def barred(self) -> bool:
        if self.policy == "priority":
            holding = self.tasks.holds[:, None] & (self.start <= self.now) & (self.now < self.end)
            return bool(holding.any())
        if self.policy == "fixed":
            for task in np.flatnonzero(self.tasks.stream == ALL_TO_ALL):
                own = self.tasks.pair == self.tasks.pair[task]
                own = own if self.tasks.pair[task] >= 0 else np.arange(self.count) == task
                own &= self.tasks.stream == ALL_TO_ALL
                if self.start[own].min() <= self.now and self.end[own].max() > self.now:
                    return True
        return False

    def run(self):
        limit = self.tasks.seconds.sum() * 2 + self.tasks.release.sum() + 1
        while (self.end == np.inf).any():
            if self.now > limit:
                return None
            while self.settle() or self.launch():
                pass
            shared = bool(self.in_flight(ALL_TO_ALL)) and bool(self.in_flight(ALL_REDUCE))
            for task in range(self.count):
                rate = 0.5 if shared and self.tasks.stream[task] != COMPUTE else 1.0
                running = (self.start[task] <= self.now) & (self.end[task] == np.inf)
                self.left[task, running] -= self.tick * rate
            self.now += self.tick
        return self.start, self.end


@pytest.mark.parametrize("policy", POLICIES)
@tried(150, tasks=steps())
def test_equals_a_simulation_tick_by_tick(policy, tasks):
    wanted = Ticks(tasks, policy).run()
    if wanted is None:
        assert policy == "fixed"
        with pytest.raises(InputError, match="never comes"):
            run_streams(tasks, policy)
        return
    start, end = run_streams(tasks, policy)
    np.testing.assert_array_equal(start, wanted[0])
    np.testing.assert_array_equal(end, wanted[1])


@tried(
    150,
    tasks=steps(whole=False),
    policy=st.sampled_from(("fair", "priority", "fifo")),
    use=st.tuples(st.floats(0.1, 1), st.floats(0.1, 1)),
)
def test_keeps_every_rule_for_any_shares_of_the_network(tasks, policy, use):
    start, end = run_streams(tasks, policy, use)
    makespan = check_streams(tasks, policy, use, start, end)
    assert makespan == end.max()
    # No policy idles while there is work and none can beat any one group's own computations.
    assert makespan >= tasks.seconds[tasks.stream == COMPUTE].sum(axis=0).max(initial=0) * (1 - 1e-12)
    assert makespan <= tasks.seconds.sum() + tasks.release.max() + 1e-9


def test_sharing_by_hand():
    both = step(alltoall(2), allreduce(3))
    # Half speed until the all-to-all has its 2 s at 4 s; 1 s of the all-reduce is left.
    assert times(both, "fair") == [(0, 4), (0, 5)]
    assert times(both, "priority") == times(both, "fifo") == [(0, 2), (2, 5)]
    # An all-to-all that fills a quarter of the network is not slowed, and leaves three quarters.
    assert times(both, "fair", (0.25, 1.0)) == [(0, 2), (0, 3.5)]
    assert times(both, "fair", (0.4, 0.5)) == [(0, 2), (0, 3)]


@pytest.mark.parametrize(
    ("use", "rates"),
    [((1, 1), (0.5, 0.5)), ((0.5, 1), (1, 0.5)), ((1, 0.2), (0.8, 1)), ((0.8, 0.625), (0.625, 0.8)), ((0.3, 0.6), (1, 1))],
)
def test_shares(use, rates):
    assert shared_rates(use) == pytest.approx(rates)
    assert shared_rates(use[::-1]) == pytest.approx(rates[::-1])


def test_a_holding_computation_keeps_all_reduces_back_and_fixed_starts_them_between_pairs_only():
    # The group that starts to hold last is not the one that holds longest.
    rows = compute([0, 1]), compute([3, 1], holds=True), allreduce(1, release=0.5)
    assert times(step(*rows, groups=2), "priority")[2] == (3, 4)
    rows = (alltoall(2, pair=7), compute(3, after=[0]), alltoall(2, after=[1], pair=7), allreduce(4), allreduce(1, release=3))
    # At 0 the all-to-all goes first and opens the pair, which is closed at 7.
    assert times(step(*rows), "fixed") == [(0, 2), (2, 5), (5, 7), (7, 11), (11, 12)]


DEFERRED = "task 1: policy 'fixed' defers this all-reduce to the end of pair 3"


@pytest.mark.parametrize(
    ("policy", "rows", "message"),
    [
        ("priority", (compute(1, after=[1]), compute(1)), "0, 1 wait"),
        ("priority", (compute(1, after=[1]), alltoall(1, after=[0])), "0, 1 wait"),
        ("priority", (allreduce(1, after=[1]), alltoall(1, after=[0]), compute(1)), "0, 1 wait"),
        ("priority", (alltoall(1, after=[0]),), "0 wait"),
        ("priority", tuple(compute(1, after=[0]) for _ in range(7)), "0, 1, 2, 3, 4 and 2 more wait"),
        ("fixed", (alltoall(1, pair=3), allreduce(1), alltoall(1, pair=3, after=[1])), DEFERRED),
    ],
)
def test_tasks_that_wait_for_each_other_are_refused(policy, rows, message):
    with pytest.raises(InputError, match=message):
        run_streams(step(*rows), policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": np.ones(2)}, "seconds: shape"),
        ({"seconds": np.ones((2, 0))}, "seconds: shape"),
        ({"seconds": np.array([[1.0, 1.0], [-1.0, -1.0]])}, "seconds: every value"),
        ({"seconds": np.array([[1.0, 1.0], [1.0, 2.0]])}, "seconds of task 1"),
        ({"release": [0.0]}, "release: shape"),
        ({"release": [0.0, np.nan]}, "release: every value"),
        ({"stream": [0, 3]}, "stream: wanted"),
        ({"edges": [[0, 2]]}, "edges: wanted"),
        ({"edges": [[-1, 1]]}, "edges: wanted"),
        ({"edges": [[0, 1, 1]]}, "edges: wanted"),
        ({"pair": [0, -1]}, "pair: wanted"),
        ({"pair": [-1, -2]}, "pair: wanted"),
        ({"holds": [False, True]}, "holds: only"),
    ],
)
def test_malformed_tasks_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(step(compute(1), alltoall(1), groups=2), **change)


@pytest.mark.parametrize(
    ("policy", "use", "message"),
    [("lifo", (1, 1), "'lifo'"), ("fair", (0, 1), "above 0"), ("fair", (1, 1.5), "at most 1"), ("fair", (np.nan, 1), "use")],
)
def test_unknown_policies_and_shares_are_refused(policy, use, message):
    with pytest.raises(InputError, match=message):
        run_streams(step(compute(1)), policy, use)


def test_the_check_finds_what_is_wrong():
    """Every rule of the validator is broken once."""
    tasks = step(compute(1), alltoall(2, after=[0], pair=0), allreduce(3), allreduce(1, release=0.5), compute(1, holds=True))
    for policy, (task, shift) in product(POLICIES, ((0, 0.1), (1, -0.1), (1, 0.1), (2, 0.1), (3, 0.1), (4, -0.1))):
        start, end = run_streams(tasks, policy)
        check_streams(tasks, policy, (1, 1), start, end)
        moved = np.zeros_like(start)
        moved[task] = shift
        for begin in (start, start + moved):
            with pytest.raises(IllegalError):
                check_streams(tasks, policy, (1, 1), begin, end + moved)
    waits = step(allreduce(1), alltoall(2, release=0.5), allreduce(3), alltoall(1, release=0.7))
    held, twice = step(compute(2, holds=True), allreduce(1, release=1)), step(alltoall(1), alltoall(1))
    turns = step(alltoall(1, release=0.9), alltoall(1), alltoall(1, release=0.5))
    late, torn = step(allreduce(1), allreduce(1, release=0.7), allreduce(1, release=0.5)), step(alltoall(1), groups=2)
    by_readiness, by_index = (np.array(starts)[:, None] for starts in ([2.0, 0.0, 1.0], [0.0, 1.0, 2.0]))
    check_streams(turns, "fifo", (1, 1), by_readiness, by_readiness + 1)
    sharing = ("fair", "priority", "fixed")
    for wrong, policy, spans, message in (
        (waits, "priority", run_streams(waits, "fifo"), "all-to-all 1 waits"),
        (waits, "fifo", run_streams(waits, "priority"), "was ready first"),
        (waits, "fixed", run_streams(waits, "fair"), "none may start|for nothing"),
        (waits, "fair", run_streams(waits, "fifo"), "for nothing"),
        (waits, "priority", run_streams(waits, "fair"), "together"),
        (held, "priority", run_streams(held, "fifo"), "none may start"),
        (twice, "fair", (np.zeros((2, 1)), np.full((2, 1), 2.0)), "together"),
        *((turns, policy, (by_readiness, by_readiness + 1), "turn") for policy in sharing),
        *((late, policy, (by_index, by_index + 1), "turn") for policy in sharing),
        (torn, "fair", (np.array([[0.0, 1.0]]), np.array([[1.0, 2.0]])), "all groups at once"),
    ):
        with pytest.raises(IllegalError, match=message):
            check_streams(wrong, policy, (1, 1), *spans)
