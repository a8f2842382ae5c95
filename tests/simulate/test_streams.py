"""Tasks on streams: against a naive simulation tick by tick, against the rules, by hand, and under changes without effect."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError, InputError
from engine.simulate.streams import (
    ALL_REDUCE,
    ALL_TO_ALL,
    COMPUTE,
    HOST_IN,
    HOST_OUT,
    LOCAL,
    POLICIES,
    Tasks,
    run_streams,
    shared_rates,
)
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
    among = (COMPUTE, COMPUTE, COMPUTE, ALL_TO_ALL, ALL_REDUCE, ALL_TO_ALL, ALL_REDUCE, HOST_IN, HOST_OUT)
    kinds = draw(st.lists(st.sampled_from(among), min_size=1, max_size=9))
    duration = st.integers(0, 3).map(float) if whole else st.floats(0.01, 3)
    rows, collectives = [], 0
    for index, kind in enumerate(kinds):
        collectives += kind not in LOCAL
        kind = kind if kind in LOCAL or collectives <= MOST_COLLECTIVES else COMPUTE
        row = {"stream": kind, "after": draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else ()}
        row["release"] = draw(st.sampled_from((0.0, 0.0, 1.0, 4.0)))
        row["seconds"] = draw(st.tuples(*[duration] * groups)) if kind in LOCAL else draw(duration)
        row["holds"] = kind == COMPUTE and draw(st.booleans())
        row["pair"] = draw(st.integers(-1, 1)) if kind == ALL_TO_ALL else -1
        rows.append(row)
    return step(*rows, groups=groups)


def ticks(tasks: Tasks, policy: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The same step tick by tick: at every tick everything that may start does, then all in flight works for a tick. None if
    it never ends.

    With whole seconds and half speeds, a tick of 2**-collectives meets every event exactly.
    """
    stream, pair, left, ready_at, now = tasks.stream, tasks.pair, tasks.seconds.copy(), {}, 0.0
    start, end = np.full(left.shape, np.inf), np.full(left.shape, np.inf)
    tick = 1.0 if policy in EXCLUSIVE else 2.0**-MOST_COLLECTIVES
    collectives = np.flatnonzero(~np.isin(stream, LOCAL))

    def ready(task: int, group: int) -> bool:
        inputs = [before for before, after in tasks.edges if after == task]
        ends = [end[one, group] if stream[task] in LOCAL and stream[one] in LOCAL else end[one].max() for one in inputs]
        return max([tasks.release[task], *ends]) <= now

    def in_flight(*kinds: int) -> list[int]:
        return [task for task in collectives if stream[task] in kinds and start[task, 0] <= now < end[task, 0]]

    def settle() -> bool:
        """End the tasks without work left and start computations; True if anything happened."""
        over = (start <= now) & (end == np.inf) & (left == 0)
        end[over], happened = now, bool(over.any())
        for group, line in product(range(left.shape[1]), LOCAL):
            for task in [task for task in np.flatnonzero(stream == line) if end[task, group] == np.inf][:1]:
                if start[task, group] == np.inf and ready(task, group):
                    start[task, group], happened = now, True
        return happened

    def barred() -> bool:
        if policy == "priority":
            return bool((tasks.holds[:, None] & (start <= now) & (now < end)).any())
        alltoalls = np.flatnonzero(stream == ALL_TO_ALL) if policy == "fixed" else []
        pairs = [alltoalls[pair[alltoalls] == pair[task]] if pair[task] >= 0 else [task] for task in alltoalls]
        return any(start[own].min() <= now < end[own].max() for own in pairs)

    def launch() -> bool:
        """Start at most one collective of a class; True if one was."""
        waiting, launched = {ALL_TO_ALL: [], ALL_REDUCE: []}, False
        for task in collectives:
            if start[task, 0] == np.inf and all(ready(task, group) for group in range(left.shape[1])):
                waiting[int(stream[task])].append((ready_at.setdefault(task, now), task))
        waiting[ALL_REDUCE].sort()
        if policy == "fifo":
            waiting = {ALL_TO_ALL: sorted(waiting[ALL_TO_ALL] + waiting[ALL_REDUCE])}
        for kind, queue in waiting.items():
            flying = in_flight(*((ALL_TO_ALL, ALL_REDUCE) if policy in EXCLUSIVE else (kind,)))
            if queue and not flying and not (kind == ALL_REDUCE and barred()):
                start[queue[0][1]], launched = now, True
        return launched

    while (end == np.inf).any():
        if now > tasks.seconds.sum() * 2 + tasks.release.sum() + 1:
            return None
        while settle() or launch():
            pass
        shared = bool(in_flight(ALL_TO_ALL)) and bool(in_flight(ALL_REDUCE))
        rate = np.where(shared & ~np.isin(stream, LOCAL), 0.5, 1.0)[:, None]
        left -= tick * rate * ((start <= now) & (end == np.inf))
        now += tick
    return start, end


@pytest.mark.parametrize("policy", POLICIES)
@tried(150, tasks=steps())
def test_equals_a_simulation_tick_by_tick(policy, tasks):
    wanted = ticks(tasks, policy)
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
    np.testing.assert_array_equal(run_streams(tasks, policy, together=shared_rates(use)), (start, end))
    # No policy idles while there is work and none can beat any one group's own computations.
    assert makespan >= tasks.seconds[tasks.stream == COMPUTE].sum(axis=0).max(initial=0) * (1 - 1e-12)
    assert makespan <= tasks.seconds.sum() + tasks.release.max() + 1e-9


@pytest.mark.parametrize(
    ("use", "rates"),
    [((1, 1), (0.5, 0.5)), ((0.5, 1), (1, 0.5)), ((1, 0.2), (0.8, 1)), ((0.8, 0.625), (0.625, 0.8)), ((0.3, 0.6), (1, 1))],
)
def test_shares(use, rates):
    assert shared_rates(use) == pytest.approx(rates)
    assert shared_rates(use[::-1]) == pytest.approx(rates[::-1])


def test_all_to_alls_go_in_program_order_and_all_reduces_as_they_become_ready():
    for kind, policy, wanted in (
        (alltoall, "priority", [(4, 5), (5, 6), (0, 4)]),
        (alltoall, "fifo", [(5, 6), (4, 5), (0, 4)]),
        (allreduce, "priority", [(5, 6), (4, 5), (0, 4)]),
    ):
        assert times(step(kind(1, release=2), kind(1, release=1), kind(4)), policy) == wanted


def test_a_holding_computation_keeps_all_reduces_back_and_fixed_starts_them_between_pairs_only():
    # The group that starts to hold last is not the one that holds longest.
    rows = compute([0, 1]), compute([3, 1], holds=True), allreduce(1, release=0.5), allreduce(1, release=1.5)
    assert times(step(*rows, groups=2), "priority")[2:] == [(3, 4), (4, 5)]
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
        ({"stream": [0, 6]}, "stream: wanted"),
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


@pytest.mark.parametrize("together", [(0, 1), (1, 1.5), (np.nan, 1)])
def test_speeds_together_are_above_0_and_at_most_1_and_a_quarter_is_a_quarter(together):
    with pytest.raises(InputError, match="together"):
        run_streams(step(compute(1)), "fair", together=together)
    _, end = run_streams(step(alltoall(1), allreduce(1)), "fair", together=(0.25, 0.25))
    assert end[:, 0].tolist() == [4, 4]


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
