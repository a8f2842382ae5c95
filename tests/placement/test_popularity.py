"""Expert popularity predicted from paths against counting token by token, and under changes that must not matter."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError, InputError
from engine.formats import read_workload
from engine.placement.popularity import estimate_devices, most_popular, profile_paths
from engine.result import Status
from tests.cases.examples import tried
from tests.oracles.placing import check_popularity

SAMPLES = Path(__file__).parent.parent.parent / "sample_traces" / "tiny-moe"


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


def checked(case: dict, result) -> float:
    names = {name: value for name, value in case.items() if name != "num_experts"}
    return check_popularity(result.solution, experts=case["num_experts"], **names)


@tried(200, cases())
def test_equals_counting_token_by_token(case):
    result = estimate_devices(**case)
    assert result.objective == pytest.approx(checked(case, result), rel=1e-12) == result.solution.sum()
    assert (result.status, result.gap) == (Status.OPTIMAL, 0.0)
    assert result.solution.shape == (case["num_experts"],)


@tried(60, cases(), st.integers(0, 2**32 - 1))
def test_what_changes_nothing_and_what_only_adds(case, seed):
    rng = np.random.default_rng(seed)
    devices_of_expert = estimate_devices(**case).solution
    shuffled = {name: rng.permutation(case[name]) for name in ("train", "test_prefix")}
    np.testing.assert_allclose(estimate_devices(**(case | shuffled)).solution, devices_of_expert, rtol=1e-12)
    twice = {name: np.concatenate([case[name]] * 2) for name in ("train", "test_prefix")}
    np.testing.assert_allclose(estimate_devices(**(case | twice)).solution, devices_of_expert, rtol=1e-12)
    more = estimate_devices(**(case | {"devices": 3 * case["devices"]})).solution
    np.testing.assert_allclose(more, 3 * devices_of_expert, rtol=1e-12)
    everything = estimate_devices(**(case | {"top_k": case["num_experts"]})).solution
    assert (everything >= devices_of_expert - 1e-12).all()
    assert everything.sum() == pytest.approx(case["devices"])
    renamed = np.append(rng.permutation(case["num_experts"]), -1)  # a missing choice stays missing
    other = {name: renamed[case[name]] for name in ("train", "test_prefix")}
    same = estimate_devices(**(case | other | {"top_k": case["num_experts"]})).solution
    np.testing.assert_allclose(same[renamed[:-1]], everything, rtol=1e-12)


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
    np.testing.assert_allclose(profile.estimate(seen, 1, 1), [2 / 3, 0, 0])
    np.testing.assert_allclose(profile.estimate(seen, 1, 2), [2 / 3, 0, 1 / 3])
    np.testing.assert_allclose(profile.estimate(unseen, 1, 1), [0, 0, 3 / 6])
    np.testing.assert_allclose(profile.estimate(unseen, 1, 3), [2 / 6, 1 / 6, 3 / 6])
    np.testing.assert_allclose(profile.estimate(np.concatenate([seen, unseen]), 1, 1), [1 / 3, 0, 1 / 4])
    assert most_popular(np.array([1.0, 3, 3, 0]), 3).tolist() == [1, 2, 0]
    with pytest.raises(InputError, match=r"layer 2 was not profiled \(profiled: 1 … 1\)"):
        profile.estimate(seen, 2, 1)


def test_paths_that_say_everything_predict_exactly():
    rng = np.random.default_rng(0)
    paths = np.stack(np.unravel_index(rng.permutation(4**3)[:50], (4, 4, 4)), axis=1)
    train = np.column_stack([paths, rng.integers(0, 4, 50)])
    estimate = profile_paths(train, 4, 3).estimate(paths, 2, 1)
    np.testing.assert_allclose(estimate, np.bincount(train[:, 3], minlength=4) / 50, rtol=1e-12)


def test_longer_paths_predict_a_recording_better():
    experts = read_workload(SAMPLES / "alpha-code.npz", num_experts=16).experts[:, :, 0]
    odd = np.arange(len(experts)) // 128 % 2 == 1
    train, test = experts[~odd], experts[odd].astype(np.int64)

    def error(path_length: int) -> float:
        """Mean distance between the predicted and the actual shares over layers 4 to 7."""
        profile = profile_paths(train, 16, path_length)
        apart = []
        for layer in range(3, 7):
            predicted = profile.estimate(test[:, layer - path_length + 1 : layer + 1], layer, 1)
            apart.append(np.abs(predicted / predicted.sum() - np.bincount(test[:, layer + 1]) / len(test)).sum() / 2)
        return float(np.mean(apart))

    assert error(3) < 0.5 * error(1)


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
        ({"train": [[0, 3, 1]]}, "train|experts: there is no expert 3"),
        ({"train": [[0, -2, 1]]}, "no expert -2"),
        ({"train": [0, 1, 1]}, "table of whole numbers"),
        ({"train": [[0.0, 1.0, 1.0]]}, "table of whole numbers"),
        ({"train": [[0, 1, -1]]}, "no token of the profile"),
        ({"test_prefix": np.zeros((0, 2), dtype=int)}, "at least one token"),
        ({"path_length": 0}, "path_length: 0"),
        ({"top_k": 0}, "top_k: 0"),
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
