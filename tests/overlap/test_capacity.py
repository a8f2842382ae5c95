"""Dropped tokens of cut batches, against tokens served one by one."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.launch.step.layout import kept
from tests.cases.examples import examples
from tests.overlap.capacity_passing import (
    even_bounds,
    kept_by_importance,
    kept_by_micro_batches,
    kept_with_passing,
    sent,
)


def one_by_one(experts: np.ndarray, num_experts: int, capacity: int, served: list[tuple[int, int]]) -> np.ndarray:
    """Mask when the (token, choice) pairs are served in the given order."""
    left, mask = [capacity] * num_experts, np.zeros(experts.shape, dtype=bool)
    for token, choice in served:
        expert = experts[token, choice]
        if expert >= 0 and left[expert] > 0:
            left[expert] -= 1
            mask[token, choice] = True
    return mask


@st.composite
def batches(draw, choices: int = 3) -> tuple[np.ndarray, int, int, np.ndarray]:
    """experts int[token, choice], number of experts, capacity, bounds of some uneven parts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens, k = draw(st.integers(0, 40)), draw(st.integers(1, choices))
    num_experts = draw(st.integers(k, 6))
    scores = rng.random((tokens, num_experts)) * rng.random(num_experts)
    experts = np.argsort(-scores, axis=1)[:, :k].astype(draw(st.sampled_from([np.int16, np.int64])))
    experts[rng.random(experts.shape) < draw(st.sampled_from([0.0, 0.1]))] = -1
    bounds = np.sort(rng.integers(0, tokens + 1, draw(st.integers(0, 4))))
    return experts, num_experts, draw(st.integers(0, 12)), np.array([0, *bounds, tokens])


many = settings(max_examples=examples(150), deadline=None)


@many
@given(batches(), st.sampled_from(["token", "choice"]))
def test_a_whole_batch_is_served_in_order(batch, service):
    experts, num_experts, capacity, _ = batch
    tokens, choices = experts.shape
    if service == "token":
        served = [(token, choice) for token in range(tokens) for choice in range(choices)]
    else:
        served = [(token, choice) for choice in range(choices) for token in range(tokens)]
    expected = one_by_one(experts, num_experts, capacity, served)
    assert np.array_equal(kept(experts, num_experts, capacity, service), expected)


@many
@given(batches())
def test_passing_capacity_drops_the_same_tokens_and_micro_batches_never_fewer(batch):
    experts, num_experts, capacity, bounds = batch
    whole = kept(experts, num_experts, capacity)
    assert np.array_equal(kept_with_passing(experts, num_experts, capacity, bounds), whole)
    uncut = np.bincount(experts[whole], minlength=num_experts)
    apart = kept_by_micro_batches(experts, num_experts, capacity, bounds)
    assert (np.bincount(experts[apart], minlength=num_experts) <= uncut).all()
    for mask in (whole, apart):
        sizes = sent(experts, mask, num_experts, bounds)
        assert sizes.shape == (len(bounds) - 1, num_experts) and sizes.sum() == mask.sum()
        for part, (first, end) in enumerate(pairwise(bounds)):
            for expert in range(num_experts):
                assert sizes[part, expert] == (experts[first:end] == expert)[mask[first:end]].sum()


@many
@given(batches(choices=1))
def test_with_one_choice_a_token_both_orders_of_service_are_one(batch):
    experts, num_experts, capacity, bounds = batch
    whole = kept(experts, num_experts, capacity, "choice")
    assert np.array_equal(whole, kept(experts, num_experts, capacity, "token"))
    assert np.array_equal(kept_with_passing(experts, num_experts, capacity, bounds, "choice"), whole)


@many
@given(batches(), st.integers(0, 2**32 - 1))
def test_important_tokens_are_served_first(batch, seed):
    experts, num_experts, capacity, _ = batch
    tokens, choices = experts.shape
    importance = np.random.default_rng(seed).integers(0, 5, tokens).astype(float)
    order = sorted(range(tokens), key=lambda token: (-importance[token], token))
    for service, served in (
        ("token", [(token, choice) for token in order for choice in range(choices)]),
        ("choice", [(token, choice) for choice in range(choices) for token in order]),
    ):
        expected = one_by_one(experts, num_experts, capacity, served)
        assert np.array_equal(kept_by_importance(experts, importance, num_experts, capacity, service), expected)


def test_the_example_of_the_paper():
    # Capacity 8, two micro-batches with 6 and 2 tokens for expert 0: apart, the first may keep only 4 of its 6.
    experts = np.array([0] * 6 + [1] * 2 + [0] * 2 + [1] * 6)[:, None]
    bounds = even_bounds(16, 2)
    assert kept(experts, 2, 8).all() and kept_with_passing(experts, 2, 8, bounds).all()
    apart = kept_by_micro_batches(experts, 2, 8, bounds)
    assert np.flatnonzero(~apart[:, 0]).tolist() == [4, 5, 14, 15]
    assert sent(experts, kept(experts, 2, 8), 2, bounds).tolist() == [[6, 2], [2, 6]]


def test_batch_prioritised_routing_cannot_be_cut_in_front_of_the_gate():
    # The most important token is the last one. Whoever serves the parts in turn has given its place away before.
    experts, importance, bounds = np.zeros((4, 1), int), np.array([0.1, 0.2, 0.3, 0.9]), even_bounds(4, 2)
    whole = kept_by_importance(experts, importance, 1, 1)
    assert whole[:, 0].tolist() == [False, False, False, True]
    first = kept_by_importance(experts[:2], importance[:2], 1, 1)
    assert first[:, 0].tolist() == [False, True]
    assert kept_with_passing(experts, 1, 1, bounds)[:, 0].tolist() == [True, False, False, False]


def test_serving_all_first_choices_first_cannot_be_cut_either():
    # Expert 1 has one place. Token 1's first choice has a claim on it before token 0's second, but comes a part later.
    experts, bounds = np.array([[0, 1], [1, 0]]), np.array([0, 1, 2])
    assert kept(experts, 2, 1, "choice").tolist() == [[True, False], [True, False]]
    assert kept_with_passing(experts, 2, 1, bounds, "choice").tolist() == [[True, True], [False, False]]
    assert kept(experts, 2, 1, "token").tolist() == [[True, True], [False, False]]


def test_even_bounds():
    assert even_bounds(10, 4).tolist() == [0, 2, 5, 7, 10]
    assert even_bounds(0, 1).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kept(np.array([0, 1]), 2, 1), "token, choice"),
        (lambda: kept(np.array([[0.5]]), 2, 1), "integers"),
        (lambda: kept(np.array([[2]]), 2, 1), "expert 2 of 2"),
        (lambda: kept_by_importance(np.array([[0]]), np.array([1.0, 2.0]), 1, 1), "importance"),
        (lambda: kept_by_importance(np.array([[0]]), np.array([np.nan]), 1, 1), "importance"),
        (lambda: kept_with_passing(np.array([[0]]), 1, 1, np.array([0, 2])), "from 0 to 1"),
        (lambda: kept_with_passing(np.array([[0]]), 1, 1, np.array([0, 1, 0, 1])), "rise"),
        (lambda: sent(np.array([[0]]), np.array([True]), 1, np.array([0, 1])), "mask"),
        (lambda: even_bounds(3, 4), "4 parts of 3 tokens"),
        (lambda: even_bounds(3, 0), "0 parts"),
    ],
)
def test_bad_input_is_said(call, message):
    with pytest.raises(InputError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)
