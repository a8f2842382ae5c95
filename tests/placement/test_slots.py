"""Slots of experts: the nearest even placement, experts per device in training, and the search over exchanges."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import InputError
from engine.placement.even_slots import even_slots
from engine.placement.exchange_search import exchange_search
from engine.placement.experts_per_device import pack_experts, packing_choices
from engine.result import Status
from tests.cases.examples import tried
from tests.strategies import seeds


def slowest(held: np.ndarray, tokens: np.ndarray, speed: np.ndarray) -> float:
    return float(((tokens / held.sum(axis=1)) @ held / speed).max())


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(draw(seeds))
    experts, gpus, layers = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    held = rng.random((layers, experts, gpus)) < rng.choice([0.0, 0.3, 0.7])
    held[:, np.arange(experts), rng.integers(0, gpus, experts)] = True
    least = -(-experts // gpus)
    slots = draw(st.integers(least, experts))
    return held, rng.pareto(1.0, (layers, experts)) * rng.choice([0, 1, 1]), rng.choice([1.0, 0.5], gpus), slots


@tried(200, cases())
def test_it_is_even_whole_and_moves_as_little_as_it_can(case):
    held, load, speed, slots = case
    even = even_slots(held, load, speed, slots)
    assert (even.sum(axis=1) == slots).all() and even.any(axis=2).all()
    for before, after in zip(held, even, strict=True):
        have = before.sum(axis=0)
        short, spare = np.maximum(slots - have, 0).sum(), np.maximum(have - slots, 0).sum()
        new, gone = (after & ~before).sum(), (before & ~after).sum()
        assert new >= short and gone >= spare and new - gone == short - spare
        if spare <= short:  # then nobody is left without a home, and no further copy has to go
            assert (new, gone) == (short, spare)


@pytest.mark.parametrize(
    ("held", "load", "speed", "slots", "wanted"),
    [
        # What is even already stays.
        (((0, 1), (2, 3)), [1, 1, 1, 1], [1, 1], 2, ((0, 1), (2, 3))),
        # The heaviest stay on the fast GPU, and the lightest leaves it.
        (((0, 1, 2), (3,)), [9, 1, 8, 2], [2, 1], 2, ((0, 2), (1, 3))),
        # A replica of the heaviest fills the short GPU first.
        (((0, 1, 2), (3,)), [10, 1, 1, 2], [1, 1], 3, ((0, 1, 2), (0, 1, 3))),
    ],
)
def test_by_hand_which_copies_move(held, load, speed, slots, wanted):
    table = np.array([[[expert in column for column in held] for expert in range(4)]])
    even = even_slots(table, np.array([load], float), np.array(speed, float), slots)
    assert tuple(tuple(np.flatnonzero(column)) for column in even[0].T) == wanted


@tried(25, seeds)
def test_it_is_near_the_best_of_all_projections_that_move_as_little(seed):
    """Among all ways to drop and add so few copies, on cases small enough to go through them; a heuristic."""
    rng = np.random.default_rng(seed)
    experts, gpus, slots = 4, 3, 2
    held = np.zeros((experts, gpus), dtype=bool)
    held[np.arange(experts), rng.integers(0, gpus, experts)] = True
    tokens, speed = rng.integers(1, 20, experts).astype(float), np.ones(gpus)
    even = even_slots(held[None], tokens[None], speed, slots)[0]
    best = np.inf
    for columns in product(combinations(range(experts), slots), repeat=gpus):
        other = np.array([[expert in column for column in columns] for expert in range(experts)])
        if other.any(axis=1).all() and (other & ~held).sum() <= (even & ~held).sum():
            best = min(best, slowest(other, tokens, speed))
    assert best <= slowest(even, tokens, speed) + 1e-9 and slowest(even, tokens, speed) <= 1.4 * best


def test_slots_that_can_not_be():
    held = np.eye(4, dtype=bool)[None, :, :2] | np.array([[[True, False]]])
    for slots, says in ((1, "1 slots on each of 2 GPUs do not hold 4"), (5, "5 slots on a GPU are more than the 4 experts")):
        with pytest.raises(InputError, match=says):
            even_slots(held, np.ones((1, 4)), np.ones(2), slots)


GB = 1e9
positive = st.floats(0.01, 10)


def doubled(ffn, alltoall, choices, bytes_per_expert, memory):
    """The paper's rule: double until the FFN takes as long as the all-to-all, memory is full, or all are everywhere."""
    at = 0
    while ffn[at] < alltoall[at] and at + 1 < len(choices) and choices[at + 1] * bytes_per_expert <= memory:
        at += 1
    return choices[at]


def test_choices():
    sizes = ((16, 16), (16, 4), (8, 16), (12, 4), (10, 4), (5, 1), (1, 3))
    choices = [1, 2, 4, 8, 16], [4, 8, 16], [1, 2, 4, 8], [3, 6, 12], [3, 6, 10], [5], [1]
    assert tuple(packing_choices(*size).tolist() for size in sizes) == choices


def test_packing_by_hand():
    ffn, alltoall = [1, 2, 4, 8, 16], [3, 2.9, 2.5, 1.5, 0]
    result = pack_experts(ffn, alltoall, 16, 16, 2 * GB, 100 * GB)
    answer = result.solution
    assert (answer.experts_per_device, result.objective, result.bound) == (4, 0, 0)
    assert answer.efficiency == pytest.approx([1 / 3, 2 / 2.9, 1, 1, 1])
    assert answer.memory.tolist() == [2 * GB, 4 * GB, 8 * GB, 16 * GB, 32 * GB]
    assert not answer.needs_offloading.any()
    # Memory for three experts: two are the most, and the choice with four would need the host's memory.
    result = pack_experts(ffn, alltoall, 16, 16, 2 * GB, 6 * GB)
    assert result.solution.experts_per_device == 2 and result.status is Status.OPTIMAL
    assert result.objective == result.bound == pytest.approx(1 - 2 / 2.9)
    assert result.solution.needs_offloading.tolist() == [False, False, True, True, True]
    # Nothing fits.
    result = pack_experts([1, 2], [2, 0], 2, 2, 2 * GB, 1 * GB)
    assert result.status is Status.INFEASIBLE and result.solution.experts_per_device is None
    assert result.solution.needs_offloading.all()
    # More experts that are worse are not taken: the doubling rule would go on to 4; the table says that 2 hides most.
    assert pack_experts([1, 2, 2], [4, 3, 5], 4, 4, GB, 9 * GB).solution.experts_per_device == 2


@tried(
    200,
    experts=st.integers(1, 64),
    devices=st.integers(1, 64),
    step=st.lists(st.tuples(positive, positive), min_size=7, max_size=7),
    memory=st.integers(0, 80),
    scale=positive,
)
def test_is_the_papers_choice_where_more_experts_are_better(experts, devices, step, memory, scale):
    choices = packing_choices(experts, devices)
    ffn = np.cumsum([grown for grown, _ in step])[: len(choices)]
    alltoall = np.cumsum([shrunk for _, shrunk in step])[::-1][: len(choices)]
    result = pack_experts(ffn, alltoall, experts, devices, 1.0, memory)
    if memory < choices[0]:
        assert result.status is Status.INFEASIBLE
        return
    chosen = result.solution.experts_per_device
    assert chosen == doubled(ffn, alltoall, choices, 1.0, memory) <= memory
    same = pack_experts(scale * ffn, scale * alltoall, experts, devices, 3.0, 3.0 * memory)
    assert same.solution.experts_per_device == chosen
    more = pack_experts(ffn, alltoall, experts, devices, 1.0, memory + 8)
    assert more.objective <= result.objective


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn": [1, 2]}, "ffn: wanted .* \\[1, 2, 4\\]"),
        ({"alltoall": [1, -1, np.inf]}, "alltoall: wanted"),
        ({"experts": 0}, "0 experts on 4"),
        ({"memory": -1.0}, "memory: wanted"),
        ({"bytes_per_expert": np.nan}, "bytes_per_expert: wanted"),
    ],
)
def test_malformed_tables_are_refused(change, message):
    table = {"ffn": [1, 2, 3], "alltoall": [3, 2, 1], "experts": 4, "devices": 4, "bytes_per_expert": 1, "memory": 9}
    with pytest.raises(InputError, match=message):
        pack_experts(**(table | change))


GPUS, EXPERTS = 3, 6


def planted(seed: int):
    """A random objective of a placement that does not add up over experts."""
    cost = np.random.default_rng(seed).random((GPUS, EXPERTS, EXPERTS))
    return lambda row: float(max(cost[g][np.ix_(row == g, row == g)].sum() for g in range(GPUS)))


def legal(exact: bool, slots: np.ndarray):
    for row in product(range(GPUS), repeat=EXPERTS):
        held = np.bincount(row, minlength=GPUS)
        if np.all(held == slots) if exact else np.all(held <= slots):
            yield np.array(row)


@tried(25, st.integers(0, 2**32 - 1), st.booleans())
def test_it_is_legal_repeatable_and_no_worse_than_its_starts(seed, exact):
    slots = np.array([2, 2, 2]) if exact else np.array([4, 3, 2])
    seconds, starts = planted(seed), list(legal(exact, slots))[:2]
    place = exchange_search(starts, slots, exact, seconds, 50, seed)
    held = np.bincount(place, minlength=GPUS)
    assert np.all(held == slots) if exact else np.all(held <= slots)
    assert seconds(place) <= min(map(seconds, starts))
    np.testing.assert_array_equal(place, exchange_search(starts, slots, exact, seconds, 50, seed))


@pytest.mark.parametrize("exact", [True, False])
def test_it_finds_the_optimum_of_most_small_problems(exact):
    slots = np.array([2, 2, 2]) if exact else np.array([4, 3, 2])
    rows, problems = list(legal(exact, slots)), [planted(seed) for seed in range(12)]
    found = [seconds(exchange_search(rows[:1], slots, exact, seconds, 600, seed)) for seed, seconds in enumerate(problems)]
    assert sum(at <= min(map(seconds, rows)) * (1 + 1e-12) for at, seconds in zip(found, problems, strict=True)) >= 10


def test_a_stop_returns_the_best_start():
    rows = list(legal(True, np.array([2, 2, 2])))
    seconds = planted(3)
    place = exchange_search(rows[:5], np.array([2, 2, 2]), True, seconds, 10**9, stop=lambda: True)
    assert seconds(place) == min(map(seconds, rows[:5]))
