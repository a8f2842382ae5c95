"""One expert to a GPU against every permutation, and under changes that must not matter."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import InputError
from engine.placement.assignment import AssignmentInstance, assign
from engine.placement.baselines import linear_assignment, random_assignment, sorted_assignment
from engine.result import Status
from tests.cases.examples import tried
from tests.cases.placements import mixed_instance, routing
from tests.oracles.placing import check_assignment


@tried(
    150,
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["integer", "float", "skewed"]),
    st.sampled_from([0.1, 1.0, 3.0]),
    st.booleans(),
)
def test_equals_every_permutation(gpus, seed, kind, computation, symmetric):
    tokens, speed = routing(gpus, gpus, seed, kind)
    receive = speed if symmetric else np.random.default_rng(seed).permutation(speed)
    compute = computation * tokens.sum(axis=0) / speed[:, None]
    instance = AssignmentInstance.from_tokens(tokens, compute, speed, receive)
    result = assign(instance)
    assert result.status is Status.OPTIMAL
    assert sorted(result.solution) == list(range(instance.gpus))
    assert result.solution.dtype == np.int64
    assert result.objective == result.bound == instance.cost(result.solution)
    counted = check_assignment(result.solution, tokens, compute, speed, receive, np.ones(gpus))
    assert result.objective == pytest.approx(counted, rel=1e-12)
    assert result.objective == pytest.approx(
        min(instance.cost(np.array(order)) for order in permutations(range(instance.gpus))), rel=1e-12
    )


def test_theorem_5_1_holds_where_one_number_decides():
    """No token stays on its GPU and each GPU sends nothing: F and N are both the expert's tokens over the speed."""
    for seed in range(20):
        tokens, speed = routing(7, 7, seed, "float")
        load = tokens.sum(axis=0) / speed[:, None]
        instance = AssignmentInstance(load, load, np.zeros(7), np.zeros((7, 7)))
        by_rule = instance.cost(sorted_assignment(tokens.sum(axis=0), speed, np.ones(7, dtype=np.int64)))
        assert by_rule == pytest.approx(assign(instance).objective, rel=1e-12)


def test_no_tokens_at_all():
    result = assign(mixed_instance(np.zeros((3, 3)), np.ones(3)))
    assert (result.objective, result.gap, result.status) == (0.0, 0.0, Status.OPTIMAL)


def test_baselines():
    slots = np.array([2, 1, 3])
    assert linear_assignment(6, slots).tolist() == [0, 0, 1, 2, 2, 2]
    drawn = random_assignment(6, slots, seed=4)
    assert np.bincount(drawn).tolist() == slots.tolist()
    assert drawn.tolist() == random_assignment(6, slots, seed=4).tolist()
    assert any(drawn.tolist() != random_assignment(6, slots, seed=s).tolist() for s in range(5))
    # Rounds over the GPUs 1, 0, 2 (fastest first): 1 0 2, then 0 2, then 2.
    dealt = sorted_assignment(np.array([60.0, 50, 40, 30, 20, 10]), np.array([2.0, 3.0, 1.0]), slots)
    assert dealt.tolist() == [1, 0, 2, 0, 2, 2]
    with pytest.raises(InputError, match="6 places for 7 experts"):
        linear_assignment(7, slots)
