"""The nearest placement with as many slots on every GPU."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.placement.even_slots import even_slots
from tests.cases.examples import examples
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


@given(cases())
@settings(max_examples=examples(200), deadline=None)
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


def test_what_is_even_already_stays():
    held = np.zeros((1, 4, 2), dtype=bool)
    held[0, [0, 1], 0] = held[0, [2, 3], 1] = True
    assert (even_slots(held, np.ones((1, 4)), np.ones(2), 2) == held).all()


def test_the_heaviest_stay_on_the_fast_gpu_and_the_lightest_leave_it():
    held = np.zeros((1, 4, 2), dtype=bool)
    held[0, [0, 1, 2], 0] = held[0, 3, 1] = True
    even = even_slots(held, np.array([[9.0, 1.0, 8.0, 2.0]]), np.array([2.0, 1.0]), 2)
    assert even[0].T.tolist() == [[True, False, True, False], [False, True, False, True]]


def test_replicas_fill_short_gpus_where_they_help_most():
    held = np.zeros((1, 4, 2), dtype=bool)
    held[0, [0, 1, 2], 0] = held[0, 3, 1] = True
    even = even_slots(held, np.array([[10.0, 1.0, 1.0, 2.0]]), np.ones(2), 3)
    assert even[0, 0].all()  # the heaviest expert is now on both


@given(seeds)
@settings(max_examples=examples(25), deadline=None)
def test_it_is_near_the_best_of_all_projections_that_move_as_little(seed):
    """Among all ways to drop and add so few copies, on cases small enough to go through them; a heuristic."""
    rng = np.random.default_rng(seed)
    experts, gpus, slots = 4, 3, 2
    held = np.zeros((experts, gpus), dtype=bool)
    held[np.arange(experts), rng.integers(0, gpus, experts)] = True
    tokens, speed = rng.integers(1, 20, experts).astype(float), np.ones(gpus)
    even = even_slots(held[None], tokens[None], speed, slots)[0]
    best = np.inf
    for columns in itertools.product(itertools.combinations(range(experts), slots), repeat=gpus):
        other = np.zeros_like(held)
        for gpu, column in enumerate(columns):
            other[list(column), gpu] = True
        if other.any(axis=1).all() and (other & ~held).sum() <= (even & ~held).sum():
            best = min(best, slowest(other, tokens, speed))
    assert best <= slowest(even, tokens, speed) + 1e-9 and slowest(even, tokens, speed) <= 1.4 * best


def test_slots_that_can_not_be():
    held = np.eye(4, dtype=bool)[None, :, :2] | np.array([[[True, False]]])
    with pytest.raises(InputError, match="1 slots on each of 2 GPUs do not hold 4 experts"):
        even_slots(held, np.ones((1, 4)), np.ones(2), 1)
    with pytest.raises(InputError, match="5 slots on a GPU are more than the 4 experts"):
        even_slots(held, np.ones((1, 4)), np.ones(2), 5)
