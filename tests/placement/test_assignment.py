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


def brute_force(instance: AssignmentInstance) -> float:
    return min(instance.cost(np.array(order)) for order in permutations(range(instance.gpus)))


instances = st.builds(
    lambda gpus, seed, kind, computation: mixed_instance(*routing(gpus, gpus, seed, kind), computation),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["integer", "float", "skewed"]),
    st.sampled_from([0.1, 1.0, 3.0]),
)


@tried(150, instances)
def test_equals_every_permutation(instance):
    result = assign(instance)
    assert result.status is Status.OPTIMAL
    assert sorted(result.solution) == list(range(instance.gpus))
    assert result.solution.dtype == np.int64
    assert result.objective == result.bound == instance.cost(result.solution)
    assert result.objective == pytest.approx(brute_force(instance), rel=1e-12)


def test_different_send_and_receive_bandwidths():
    rng = np.random.default_rng(3)
    for _ in range(30):
        tokens, speed = routing(5, 5, int(rng.integers(1 << 30)), "float")
        compute = tokens.sum(axis=0) / speed[:, None]
        instance = AssignmentInstance.from_tokens(tokens, compute, rng.random(5) + 0.1, rng.random(5) + 0.1)
        assert assign(instance).objective == pytest.approx(brute_force(instance), rel=1e-12)


def test_a_trade_between_computation_and_network_is_weighed():
    """Any computation threshold alone, or network threshold alone, picks a worse corner."""
    compute = np.array([[1.0, 4.0, 9.0], [9.0, 1.0, 4.0], [4.0, 9.0, 1.0]])
    receive = np.array([[5.0, 2.0, 0.0], [0.0, 5.0, 2.0], [2.0, 0.0, 5.0]])
    instance = AssignmentInstance(compute, receive, np.zeros(3), np.zeros((3, 3)))
    result = assign(instance)
    assert result.objective == 8.0  # the corners cost 1 + 2 * 5 and 9 + 2 * 0
    assert result.solution.tolist() == [2, 0, 1]


def test_cost_adds_up_experts_of_a_gpu():
    tokens = np.array([[4.0, 1.0, 0.0], [2.0, 2.0, 3.0]])
    instance = AssignmentInstance.from_tokens(tokens, np.ones((2, 3)), np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    # GPU 0 holds experts 0 and 1: it sends nothing and receives 4; GPU 1 sends 4 at 2 and receives nothing.
    assert instance.cost(np.array([0, 0, 1])) == 2 + 2 * 4


@tried(30, st.integers(0, 10**6), st.integers(2, 12))
def test_renaming_gpus_and_experts_changing_units_and_more_tokens(seed, gpus):
    tokens, speed = routing(gpus, gpus, seed, "integer")
    rng = np.random.default_rng(seed)
    gpu, expert = rng.permutation(gpus), rng.permutation(gpus)
    objective = assign(mixed_instance(tokens, speed)).objective
    assert assign(mixed_instance(tokens[gpu][:, expert], speed[gpu])).objective == pytest.approx(objective, rel=1e-12)
    assert assign(mixed_instance(8 * tokens, speed)).objective == pytest.approx(8 * objective, rel=1e-12)
    tokens[seed % gpus, (seed // 7) % gpus] += 5
    assert assign(mixed_instance(tokens, speed)).objective >= objective * (1 - 1e-12)


def test_theorem_5_1_never_beats_the_exact_answer_and_fails_when_tokens_stay_where_they_start():
    ratios = []
    for seed in range(60):
        tokens, speed = routing(6, 6, seed, "skewed")
        instance = mixed_instance(tokens, speed)
        by_rule = instance.cost(sorted_assignment(tokens.sum(axis=0), speed, np.ones(6, dtype=np.int64)))
        ratios.append(by_rule / assign(instance).objective)
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(np.array(ratios) > 1.001) > 0.5


def test_theorem_5_1_holds_where_one_number_decides():
    """No token stays on its GPU and each GPU sends nothing: F and N are both the expert's tokens over the speed."""
    for seed in range(20):
        tokens, speed = routing(7, 7, seed, "float")
        load = tokens.sum(axis=0) / speed[:, None]
        instance = AssignmentInstance(load, load, np.zeros(7), np.zeros((7, 7)))
        by_rule = instance.cost(sorted_assignment(tokens.sum(axis=0), speed, np.ones(7, dtype=np.int64)))
        assert by_rule == pytest.approx(assign(instance).objective, rel=1e-12)


def test_large_instances_meet_both_thresholds_at_once():
    """At n = 80 no swap of two experts may beat the optimum, and it meets both single bounds."""
    instance = mixed_instance(*routing(80, 80, 1, "skewed"))
    result = assign(instance)
    solution = result.solution
    for first in range(0, 80, 7):
        for second in range(first + 1, 80):
            swapped = solution.copy()
            swapped[[first, second]] = solution[[second, first]]
            assert instance.cost(swapped) >= result.objective
    lowest = instance.compute.min(axis=0).max() + 2 * instance.network().min(axis=0).max()
    assert result.objective >= lowest


def test_no_tokens_at_all():
    result = assign(mixed_instance(np.zeros((3, 3)), np.ones(3)))
    assert (result.objective, result.gap, result.status) == (0.0, 0.0, Status.OPTIMAL)


ONES = np.ones((2, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: assign(mixed_instance(np.ones((2, 3)), np.ones(2))), "3 experts on 2 GPUs"),
        (lambda: AssignmentInstance.from_tokens(-ONES, ONES, ONES[0], ONES[0]), "tokens"),
        (lambda: AssignmentInstance.from_tokens(ONES, ONES, ONES[0], np.array([1.0, 0.0])), "receive_bandwidth"),
        (lambda: AssignmentInstance.from_tokens(ONES, np.nan * ONES, ONES[0], ONES[0]), "compute"),
        (lambda: AssignmentInstance(ONES, np.ones((2, 3)), ONES[0], ONES), "receive"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(InputError, match=message):
        make()


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
