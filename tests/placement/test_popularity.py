"""Expert popularity predicted from paths against counting token by token, and under changes that must not matter."""

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError, InputError
from engine.placement.popularity import estimate_devices, most_popular, profile_paths
from engine.result import Status
from tests.cases.examples import tried
from tests.oracles.placing import check_popularity


@st.composite
def cases(draw) -> dict:
    """A recording, a batch and a layer to predict; some choices missing, some paths of the batch unseen."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts, depth = draw(st.integers(1, 5)), draw(st.integers(2, 6))
    path_length = draw(st.integers(1, depth - 1))
    layer = draw(st.integers(path_length - 1, depth - 2))
    lowest = draw(st.sampled_from([0, -1]))
    train = rng.integers(lowest, experts, (draw(st.integers(1, 40)), depth))
    train[0, layer + 1] = rng.integers(experts)  # somebody chooses in the layer that is predicted
    test = rng.integers(lowest, experts, (draw(st.integers(1, 30)), path_length))
    return {
        "train": train,
        "test_prefix": test,
        "path_length": path_length,
        "top_k": draw(st.integers(1, experts)),
        "layer": layer,
        "num_experts": experts,
        "devices": draw(st.integers(1, 9)),
    }


def checked(case: dict, result) -> None:
    names = {name: value for name, value in case.items() if name != "num_experts"}
    counted = check_popularity(result.solution, experts=case["num_experts"], **names)
    assert result.objective == pytest.approx(counted, rel=1e-12) == result.solution.sum()


@tried(200, cases())
def test_equals_counting_token_by_token(case):
    result = estimate_devices(**case)
    checked(case, result)
    assert (result.status, result.gap) == (Status.OPTIMAL, 0.0)
    assert result.solution.shape == (case["num_experts"],)


@pytest.mark.parametrize("path_length", [3, 11, 20])
def test_paths_of_any_length(path_length):
    """64 experts in 11 layers are more paths than an integer of 63 bits can number."""
    rng = np.random.default_rng(path_length)
    kinds = rng.integers(0, 64, (12, path_length + 1))
    train = kinds[rng.integers(0, 12, 300)]
    train[:, -1] = (train[:, -1] + rng.integers(0, 3, 300)) % 64
    test = np.concatenate([kinds[:, :-1], rng.integers(0, 64, (5, path_length))])
    test[0, 0] = (test[0, 0] + 1) % 64  # differs from a known path in its first layer only
    case = {"train": train, "test_prefix": test, "path_length": path_length, "layer": path_length - 1}
    case |= {"top_k": 2, "num_experts": 64, "devices": 16}
    checked(case, estimate_devices(**case))


def test_ties_unseen_paths_and_truncation_by_hand():
    train = np.array([[0, 0, 2], [0, 0, 1], [0, 1, 0], [0, 1, 0], [0, 1, 2], [1, 1, 2]])
    profile = profile_paths(train, 3, 2)
    seen_twice, seen, unseen = np.array([[0, 0]]), np.array([[0, 1]]), np.array([[1, 0]])
    assert profile.estimate(seen_twice, 1, 1).tolist() == [0, 0.5, 0]  # of experts 1 and 2 the lower id
    np.testing.assert_allclose(profile.estimate(seen, 1, 2), [2 / 3, 0, 1 / 3])
    np.testing.assert_allclose(profile.estimate(np.concatenate([seen, unseen]), 1, 1), [1 / 3, 0, 1 / 4])
    assert most_popular(np.array([1.0, 3, 3, 0]), 3).tolist() == [1, 2, 0]
    with pytest.raises(InputError, match=r"layer 2 was not profiled \(profiled: 1 … 1\)"):
        profile.estimate(seen, 2, 1)


def test_the_check_sees_a_wrong_estimate():
    train, test = [[0, 1], [0, 1], [0, 0]], [[0]]
    assert check_popularity([0, 4 * 2 / 3], train, test, 1, 1, 0, 2, 4) == pytest.approx(4 * 2 / 3)
    with pytest.raises(IllegalError, match="expert 0 has"):
        check_popularity([4 / 3, 4 * 2 / 3], train, test, 1, 1, 0, 2, 4)
    with pytest.raises(IllegalError, match="experts instead of"):
        check_popularity([0], train, test, 1, 1, 0, 2, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": [[0, -2, 1]]}, "train|experts: there is no expert -2"),
        ({"train": [[0.0, 1.0, 1.0]]}, "table of whole numbers"),
        ({"train": [[0, 1, -1]]}, "no token of the profile"),
        ({"test_prefix": np.zeros((0, 2), dtype=int)}, "at least one token"),
        ({"devices": 0}, "devices: 0"),
        ({"num_experts": 0}, "0 experts"),
    ],
)
def test_bad_input_is_named(change, message):
    case = {"train": [[0, 1, 1], [2, 1, 0]], "test_prefix": [[0, 1]], "path_length": 2, "layer": 1}
    case |= {"top_k": 1, "num_experts": 3, "devices": 4}
    estimate_devices(**case)
    with pytest.raises(InputError, match=message):
        estimate_devices(**(case | change))
