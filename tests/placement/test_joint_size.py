"""Joint placement of 256 experts per layer: a fair start, an answer in seconds, a bound that says much."""

import numpy as np
import pytest

from engine.compare.synthetic import Recipe, synthetic
from engine.placement.affinity.bounds import spectral_limits
from engine.placement.baselines import linear_assignment
from engine.placement.joint.bounds import least_hop_cost_share
from engine.placement.joint.instance import JointInstance, equal_slots
from engine.placement.joint.kernel import place_jointly
from engine.placement.joint.search import first_placement
from engine.placement.joint.state import JointState, JointTerms
from engine.placement.transitions import transitions
from engine.validate.joint import check_joint
from tests.benchmarks.bench_affinity import ModelOfSize

pytestmark = pytest.mark.slow


def skewed(gpus: int, layers: int = 6, affinity: float = 0.5) -> JointInstance:
    trace = synthetic(ModelOfSize(range(layers), 256, 8), Recipe(4096, 0.8, affinity))
    return JointInstance(transitions(trace.experts, 256), trace.load, equal_slots(256, gpus))


@pytest.mark.parametrize("weight", [0.2, 0.5, 0.9])
def test_the_start_falls_back_on_balance_alone(weight):
    instance = skewed(32)
    terms = JointTerms(instance, weight, worst=True)
    balance_alone = first_placement(JointTerms(instance, 0.0, worst=True))
    assert terms.objective(first_placement(terms)) <= 1.001 * terms.objective(balance_alone)


@pytest.mark.parametrize("gpus", [32, 64])
def test_an_answer_in_seconds_with_a_bound_that_says_much(gpus):
    instance = skewed(gpus)
    result = place_jointly(instance, 0.5, kicks=10, time_limit=60.0)
    check = check_joint(result.solution, instance.transitions[0], instance.load[0], instance.slots)
    objective = 0.5 * check.hop_cost_share / instance.random_hop_cost_share + 0.5 * check.imbalance
    assert result.objective == pytest.approx(objective)
    linear = np.tile(linear_assignment(256, instance.slots), (instance.layers, 1))
    assert objective < JointTerms(instance, 0.5, worst=True).objective(linear)
    assert result.gap < 0.15


def test_the_limit_of_hops_is_that_of_the_spectra():
    instance = skewed(64, affinity=0.9)
    kept = spectral_limits(instance.transition_share[0], 64).sum()
    assert least_hop_cost_share(instance, True) == pytest.approx(1 - kept, abs=1e-9)


def test_gains_within_the_moves_are_those_of_the_swaps():
    """Whether the moves left are many, few or none, and with a price on each."""
    instance = skewed(32, layers=3)
    rng = np.random.default_rng(0)
    start = np.stack([rng.permutation(256) % 32 for _ in range(3)])
    free = JointState(JointTerms(instance, 0.5, worst=True), start)
    for most in (0, 1, 2, 3, 100):
        state = JointState(JointTerms(instance, 0.5, worst=True), start, start, most)
        for price in (0.0, 0.25):
            gains, moves = state.swap_gains(1, price), 2 * (start[1][:, None] != start[1])
            wanted = np.where(moves > most, np.inf, free.swap_gains(1) + price * moves)
            np.testing.assert_allclose(gains, wanted)
