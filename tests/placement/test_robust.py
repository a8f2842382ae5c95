"""Plans scored on workloads: token by token without replicas, by hand with replicas."""

import numpy as np
import pytest

from engine.errors import InputError
from engine.placement.robust import score_matrix, share_of_placement
from engine.validate.joint import check_joint
from tests.placement.test_joint import random_instance, random_start


def test_without_replicas_it_is_what_the_validator_counts():
    instance = random_instance((2, 2, 2), 4, 3, 0, "floats")
    places = [random_start(instance, seed) for seed in range(4)]
    scores = score_matrix(
        [share_of_placement(place, 3) for place in places], list(instance.load), list(instance.transitions)
    )
    assert scores.balancedness.shape == scores.kept_share.shape == (4, 3)
    for plan, place in enumerate(places):
        for workload in range(3):
            check = check_joint(place, instance.transitions[workload], instance.load[workload], instance.slots)
            assert scores.balancedness[plan, workload] == pytest.approx(check.balancedness, abs=1e-12)
            assert scores.kept_share[plan, workload] == pytest.approx(check.kept_share, abs=1e-12)


def test_replicas_by_hand():
    """Expert 0 half on each GPU, then expert 1: three quarters on GPU 0."""
    share = np.array([[[0.5, 0.5], [0.0, 1.0]], [[1.0, 0.0], [0.75, 0.25]]])
    tokens = np.array([[[4.0, 8.0], [0.0, 20.0]]])
    load = np.array([[12.0, 20.0], [4.0, 28.0]])
    scores = score_matrix([share], [load], [tokens])
    kept = 4 * 0.5 + 8 * (0.5 * 0.75 + 0.5 * 0.25) + 20 * 0.25
    assert scores.kept_share[0, 0] == pytest.approx(kept / 32)
    assert scores.balancedness[0, 0] == pytest.approx((16 / 26 + 16 / 25) / 2)


def test_replicas_as_drawn_at_random():
    """The mean over many placements that pick a replica for every token blindly."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(3, 0.7), (2, 4))
    tokens = rng.integers(1, 9, (1, 4, 4)).astype(float)
    before, after = (np.array([rng.choice(3, 20000, p=row) for row in layer]) for layer in share)
    stays = (before[:, None, :] == after[None]).mean(axis=2)
    scores = score_matrix([share], [tokens[0].sum(axis=1)[None].repeat(2, 0)], [tokens])
    assert scores.kept_share[0, 0] == pytest.approx((tokens[0] * stays).sum() / tokens.sum(), abs=0.01)


def test_full_replication_and_scaling():
    rng = np.random.default_rng(1)
    everywhere = np.full((3, 4, 2), 0.5)
    load, tokens = rng.random((3, 4)), rng.random((2, 4, 4))
    scores = score_matrix([everywhere], [load], [tokens])
    assert scores.balancedness[0, 0] == pytest.approx(1.0)
    assert scores.kept_share[0, 0] == pytest.approx(0.5)
    place = share_of_placement(np.array([[0, 0, 1, 1]] * 3), 2)
    small, large = (score_matrix([place], [load * scale], [tokens * scale]) for scale in (1.0, 1000.0))
    np.testing.assert_allclose(small.balancedness, large.balancedness)
    np.testing.assert_allclose(small.kept_share, large.kept_share)
    np.testing.assert_allclose(score_matrix([place[:, :, ::-1]], [load], [tokens]).kept_share, small.kept_share)


def test_nothing_recorded():
    place = share_of_placement(np.array([[0, 1], [1, 0]]), 2)
    scores = score_matrix([place], [np.array([[0.0, 0.0], [1.0, 3.0]])], [np.zeros((1, 2, 2))])
    assert scores.balancedness[0, 0] == pytest.approx((1 + 2 / 3) / 2)
    assert scores.kept_share[0, 0] == 1.0
    assert np.isnan(score_matrix([place], [np.ones((2, 2))]).kept_share).all()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (([], [np.ones((1, 2))]), "at least one plan"),
        (([np.ones((1, 2, 2))], [np.ones((1, 2))]), "plan 0, layer 0, expert 0: the shares .* add up to 2"),
        (([np.full((1, 2, 2), -0.5)], [np.ones((1, 2))]), "plan 0"),
        (([np.full((1, 2, 2), 0.5)], [np.ones((2, 2))]), r"loads: workload 0 has shape \(2, 2\)"),
        (([np.full((1, 2, 2), 0.5), np.full((2, 2, 2), 0.5)], [np.ones((1, 2))]), "shares: plan 1 has shape"),
        (([np.full((2, 2, 2), 0.5)], [np.ones((2, 2))], [np.ones((2, 2, 2))]), "transitions: workload 0"),
        (([np.full((2, 2, 2), 0.5)], [np.ones((2, 2))], []), "of 0 workloads, but loads of 1"),
        (([np.full((2, 2, 2), 0.5)], [-np.ones((2, 2))]), "loads: workload 0: every value"),
    ],
)
def test_bad_scores(arguments, part):
    with pytest.raises(InputError, match=part):
        score_matrix(*arguments)
