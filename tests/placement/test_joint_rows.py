"""Balance against rows: exact figures and changes, the best of all placements, several recordings, few moves."""

import numpy as np
import pytest

from engine.compare.synthetic import Recipe, synthetic
from engine.errors import InputError
from engine.placement.baselines import linear_assignment
from engine.placement.coactivation import CoactivationInstance
from engine.placement.joint.bounds import most_balancedness
from engine.placement.joint.instance import JointInstance, equal_slots
from engine.placement.joint.kernel import place_jointly
from engine.placement.joint.rows import RowsInstance, rows_instance, state_of, terms_of, with_starts
from engine.placement.joint.search import first_placement
from engine.placement.joint.state import JointState, JointTerms
from engine.placement.transitions import transitions
from engine.result import Limits
from tests.benchmarks.bench_affinity import ModelOfSize
from tests.cases.samples import every_placement
from tests.oracles.placing import check_joint

NO_TOKENS = np.empty((2, 0, 1), dtype=np.int16)


def recording(seed: int, tokens: int = 60, experts: int = 4, gpus: int = 2, travel: str = "gpu") -> CoactivationInstance:
    """Two layers in which tokens take two experts of a skewed choice, sent from any GPU or from outside."""
    rng = np.random.default_rng(seed)
    popular = rng.dirichlet(np.full(experts, 1.5), 2)
    chosen = np.array([[rng.choice(experts, 2, replace=False, p=popular[layer]) for _ in range(tokens)] for layer in range(2)])
    return CoactivationInstance(
        chosen, rng.integers(-1, gpus, tokens), gpus, gpus_per_node=2, travel=travel, expert_count=experts
    )


def instance_of(*recordings: CoactivationInstance) -> RowsInstance:
    load = [[each.load(layer) for layer in range(each.layers)] for each in recordings]
    return rows_instance(recordings, np.array(load, dtype=np.float64))


def objective(instance: RowsInstance, place: np.ndarray, weight: float, over: str) -> float:
    """From rows and loads alone: each of the two is the largest, or the mean, of the recordings."""
    several = max if over == "worst" else np.mean
    rows = [each.rows(place).sum() for each in instance.recordings]
    imbalance = [(each.imbalance(place) - 1).mean() for each in instance.recordings]
    return float(weight * several(rows / instance.blind_rows) + (1 - weight) * several(imbalance))


@pytest.mark.parametrize("weight", [0, 0.4, 1])
@pytest.mark.parametrize("over", ["worst", "mean"])
def test_no_placement_has_a_better_objective(weight, over):
    instance = instance_of(recording(0), recording(1, tokens=25))
    instance, starts = with_starts(instance, Limits(2.0, wall=60))
    result = place_jointly(instance, Limits(30.0, wall=100), weight=weight, workloads=over, initial=starts)
    values = [objective(instance, place, weight, over) for place in every_placement(2, 4, 2)]
    assert objective(instance, result.solution, weight, over) == pytest.approx(result.objective)
    assert result.bound - 1e-9 <= min(values) == pytest.approx(result.objective)


def test_blind_rows_are_the_mean_of_all_placements_and_the_bounds_hold_of_each():
    instance, _ = with_starts(instance_of(recording(2), recording(3)), Limits(2.0, wall=60))
    places = every_placement(2, 4, 2)
    rows = np.array([instance.rows(place) for place in places])
    assert rows.mean(axis=0) == pytest.approx(instance.blind_rows)
    assert (instance.least_rows <= rows).all() and (instance.least_rows > 0).all()
    most = most_balancedness(instance)
    assert all((instance.figures(place).balancedness <= most).all() for place in places)


@pytest.mark.parametrize("travel", ["gpu", "node"])
def test_what_a_swap_changes_is_exact(travel):
    recordings = [recording(seed, 200, 16, 4, travel) for seed in (4, 5)]
    instance = instance_of(*recordings)
    rng = np.random.default_rng(0)
    place = np.array([rng.permutation(np.arange(16) // 4) for _ in range(2)])
    state = state_of(terms_of(instance, 1.0, worst=True), place, None, None)
    for _ in range(60):
        layer, (first, second) = rng.integers(2), rng.choice(16, 2, replace=False)
        promised = state.hops + state._hop_changes(layer)[:, first, second]
        state.swap(layer, first, second)
        rows = np.array([each.rows(state.place).sum() for each in recordings])
        assert (state.rows == rows).all()
        assert state.hops == pytest.approx(promised) and state.hops == pytest.approx(rows / instance.blind_rows)
    state.undo()
    assert (state.place == place).all() and (state.rows == instance.rows(place)).all()


@pytest.mark.parametrize("most", [0, 1, 2, 4])
def test_few_moves_are_kept_and_best_used(most):
    instance = instance_of(recording(6), recording(7))
    start = np.array([[0, 1, 0, 1], [0, 0, 1, 1]])
    places = [place for place in every_placement(2, 4, 2) if (place != start).sum() <= most]
    instance, starts = with_starts(instance, Limits(1.0, wall=60))
    result = place_jointly(
        instance, Limits(30.0, wall=100), weight=0.5, workloads="worst", start=start, max_moves=most, initial=starts
    )
    assert (result.solution != start).sum() <= most
    best = min(objective(instance, place, 0.5, "worst") for place in places)
    assert objective(instance, result.solution, 0.5, "worst") == pytest.approx(best)


def test_a_recording_without_tokens_counts_for_balance_alone():
    silent = CoactivationInstance(NO_TOKENS, np.empty(0, dtype=np.int64), 2, 2, expert_count=4)
    known = recording(11)
    load = np.array([[known.load(0), known.load(1)], [[9, 1, 1, 9], [5, 1, 5, 1]]], dtype=np.float64)
    instance, starts = with_starts(rows_instance((known, silent), load), Limits(1.0, wall=60))
    assert instance.blind_rows[1] == instance.least_rows[1] == 0
    result = place_jointly(instance, Limits(30.0, wall=100), weight=0.1, workloads="worst", initial=starts)
    assert instance.figures(result.solution).balancedness[1] == 1
    assert instance.figures(result.solution).hop_cost_share[1] == 0


def test_recordings_of_different_clusters_are_refused():
    with pytest.raises(InputError, match="wanted the same GPUs"):
        rows_instance((recording(0), recording(0, travel="node")), np.ones((2, 2, 4)))


def skewed(gpus: int, layers: int = 6, affinity: float = 0.5) -> JointInstance:
    trace = synthetic(ModelOfSize(range(layers), 256, 8), Recipe(4096, 0.8, affinity))
    return JointInstance(transitions(trace.experts, 256), trace.load, equal_slots(256, gpus))


@pytest.mark.parametrize("weight", [0.5, *(pytest.param(weight, marks=pytest.mark.everything) for weight in (0.2, 0.9))])
def test_the_start_falls_back_on_balance_alone(weight):
    instance = skewed(32)
    terms = JointTerms(instance, weight, worst=True)
    balance_alone = first_placement(JointTerms(instance, 0.0, worst=True))
    assert terms.objective(first_placement(terms)) <= 1.001 * terms.objective(balance_alone)


@pytest.mark.parametrize("gpus", [32, pytest.param(64, marks=pytest.mark.everything)])
def test_an_answer_in_seconds_with_a_bound_that_says_much(gpus):
    instance = skewed(gpus, layers=2)
    result = place_jointly(instance, Limits(60.0), weight=0.5, kicks=10)
    check = check_joint(result.solution, instance.transitions[0], instance.load[0], instance.slots)
    objective = 0.5 * check.hop_cost_share / instance.random_hop_cost_share + 0.5 * check.imbalance
    assert result.objective == pytest.approx(objective)
    linear = np.tile(linear_assignment(256, instance.slots), (instance.layers, 1))
    assert objective < JointTerms(instance, 0.5, worst=True).objective(linear)
    assert result.gap < 0.15


def test_gains_within_the_moves_are_those_of_the_swaps():
    """Gains within many, few or no moves, and with a price on each."""
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
