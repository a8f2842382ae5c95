"""A recording in two parts: one to plan on, one to score on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.workload import RoutingTrace
from tests.cases.examples import examples
from tests.cases.samples import sample
from tests.strategies import seeds


def numbered(tokens: int, sequence: np.ndarray | None = None, rank: np.ndarray | None = None) -> RoutingTrace:
    """A trace whose tokens can be told apart by their choices."""
    experts = np.stack([np.arange(tokens) // 100, np.arange(tokens) % 100], axis=1)[:, None, :].astype(np.int16)
    return RoutingTrace("numbered", experts, 100, sequence, rank)


def numbers(trace: RoutingTrace) -> list[int]:
    return (trace.experts[:, 0] @ [100, 1]).tolist()


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 60), st.integers(2, 9), seeds)
def test_whole_sequences_go_to_one_half_and_no_token_is_lost(tokens, sequences, seed):
    """Sequences of any length, mixed up, under any numbers, those of the first half before all of the second."""
    rng = np.random.default_rng(seed)
    names = rng.choice(1000, sequences, replace=False)
    sequence = names[rng.integers(0, sequences, tokens)].astype(np.int32)
    rank = rng.integers(0, 4, tokens).astype(np.int32)
    first, second = numbered(tokens, sequence, rank).halves()
    assert sorted(numbers(first) + numbers(second)) == list(range(tokens))
    for part in (first, second):
        order = numbers(part)
        assert order == sorted(order)
        assert part.sequence.tolist() == sequence[order].tolist()
        assert part.source_rank.tolist() == rank[order].tolist()
        assert (part.name, part.num_experts, part.layers, part.k) == ("numbered", 100, 1, 2)
    count = len(np.unique(sequence))
    if count > 1:
        mine, theirs = set(first.sequence.tolist()), set(second.sequence.tolist())
        assert not mine & theirs and max(mine) < min(theirs)
        assert (len(mine), len(theirs)) == (count // 2, count - count // 2)


@pytest.mark.parametrize("sequence", [None, "one"])
@pytest.mark.parametrize("tokens", [2, 7, 150])
def test_without_sequences_tokens_are_halved_in_order(tokens, sequence):
    column = None if sequence is None else np.full(tokens, 5, dtype=np.int32)
    first, second = numbered(tokens, column).halves()
    assert numbers(first) == list(range(tokens // 2)) and numbers(second) == list(range(tokens // 2, tokens))
    assert (first.sequence is None) == (second.sequence is None) == (column is None)
    assert first.source_rank is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_what_cannot_be_halved_is_all_in_the_second(tokens):
    first, second = numbered(tokens).halves()
    assert (first.tokens, second.tokens) == (0, tokens)


def test_sequences_of_unequal_length_make_unequal_halves():
    sequence = np.array([9] * 7 + [2, 4, 2], dtype=np.int32)
    first, second = numbered(10, sequence).halves()
    assert numbers(first) == [7, 9] and numbers(second) == [0, 1, 2, 3, 4, 5, 6, 8]


def test_a_real_recording():
    trace = sample("alpha-code")
    first, second = trace.halves()
    assert first.tokens == second.tokens == trace.tokens // 2
    np.testing.assert_array_equal(np.concatenate([first.experts, second.experts]), trace.experts)
    assert first.digest != second.digest
    assert np.array_equal(first.load + second.load, trace.load)
