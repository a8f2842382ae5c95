"""`solve replicate-devices` and `solve popularity`, every answer held against the rules of its problem."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.validate.devices import check_devices, check_popularity
from tests.cases.examples import examples

COMMON = {"status", "objective", "bound", "runtime"}
DEVICES = {"popularity": [0.5, 0.2, 0.2, 0.1], "devices": 3, "max_experts_per_device": 2}
POPULARITY = {
    "train": [[0, 1, 2], [0, 1, 2], [0, 1, 0], [1, 0, 1]],
    "test_prefix": [[0, 1], [1, 1]],
    "path_length": 2,
    "top_k": 1,
    "layer": 1,
    "experts": 3,
    "devices": 6,
}

fixed = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def worth_of(answer: dict, instance: dict) -> float:
    return check_devices(
        answer["experts_of_device"], instance["popularity"], instance["devices"], instance["max_experts_per_device"]
    )


@pytest.mark.parametrize("algorithm", [None, "best", "lina"])
def test_replicate_devices(solver, algorithm):
    instance = DEVICES | ({"algorithm": algorithm} if algorithm else {})
    answer = solver.answer("replicate-devices", instance)
    assert set(answer) == COMMON | {"experts_of_device"}
    assert answer["objective"] == pytest.approx(worth_of(answer, instance), rel=1e-9)
    assert 1 / 3 <= answer["bound"] <= answer["objective"]
    if algorithm != "lina":
        assert answer["status"] == "OPTIMAL"
        assert answer["bound"] == pytest.approx(answer["objective"], rel=1e-9)


@fixed
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from(["best", "lina"]),
)
def test_any_hosting_is_legal_and_best_is_not_worse(solver, popularity, devices, more, algorithm):
    instance = {
        "popularity": popularity,
        "devices": devices,
        "max_experts_per_device": -(-len(popularity) // devices) + more,
    }
    answer = solver.answer("replicate-devices", instance | {"algorithm": algorithm})
    assert answer["objective"] == pytest.approx(worth_of(answer, instance), rel=1e-9)
    assert answer["bound"] <= answer["objective"]
    if algorithm == "lina":
        assert solver.answer("replicate-devices", instance)["objective"] <= answer["objective"] * (1 + 1e-9)


@pytest.mark.parametrize("popularity", [[0, 0, 0], [5e-324, 5e-324, 0], [1e307, 3e307, 5e-324]])
def test_the_smallest_and_the_largest_numbers(solver, popularity):
    instance = {"popularity": popularity, "devices": 2, "max_experts_per_device": 2}
    for algorithm in ("best", "lina"):
        answer = solver.answer("replicate-devices", instance | {"algorithm": algorithm})
        assert answer["objective"] == worth_of(answer, instance) and answer["bound"] <= answer["objective"]


def test_a_time_limit_keeps_a_legal_hosting(solver):
    popularity = (1 / np.arange(1, 33)).tolist()
    instance = {"popularity": popularity, "devices": 16, "max_experts_per_device": 3}
    answer = solver.answer("replicate-devices", instance, '{"time_limit": 1e-9}')
    assert answer["status"] == "TIME_LIMIT"
    assert answer["objective"] == pytest.approx(worth_of(answer, instance)) and answer["bound"] < answer["objective"]


def test_equal_seeds_give_equal_answers(solver):
    popularity = np.random.default_rng(0).dirichlet(np.full(12, 0.4)).tolist()
    instance = {"popularity": popularity, "devices": 6, "max_experts_per_device": 3}
    answers = [
        solver.answer("replicate-devices", instance, '{"exact": false, "seed": 3}')["experts_of_device"] for _ in "ab"
    ]
    assert answers[0] == answers[1]


def held_against_the_rules(answer: dict, instance: dict) -> None:
    assert set(answer) == COMMON | {"devices_of_expert"}
    assert answer["objective"] == pytest.approx(check_popularity(answer["devices_of_expert"], **instance), rel=1e-9)
    assert answer["bound"] == answer["objective"] and answer["status"] == "OPTIMAL"


def test_popularity(solver):
    answer = solver.answer("popularity", POPULARITY)
    held_against_the_rules(answer, POPULARITY)
    # The first token's path went to expert 2 in two of three cases, the second's is new: two of all four to expert 2.
    assert answer["devices_of_expert"] == pytest.approx([0, 0, 6 * (2 / 3 + 2 / 4) / 2])
    everything = solver.answer("popularity", POPULARITY | {"top_k": 3})
    assert everything["objective"] == pytest.approx(6)


@fixed
@given(st.data())
def test_any_popularity_is_counted_right(solver, data):
    experts, depth = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    length = data.draw(st.integers(1, depth - 1))
    ids = st.integers(0, experts - 1)
    instance = {
        "train": data.draw(st.lists(st.lists(ids, min_size=depth, max_size=depth), min_size=1, max_size=12)),
        "test_prefix": data.draw(st.lists(st.lists(ids, min_size=length, max_size=length), min_size=1, max_size=6)),
        "path_length": length,
        "top_k": data.draw(st.integers(1, experts)),
        "layer": data.draw(st.integers(length - 1, depth - 2)),
        "experts": experts,
        "devices": data.draw(st.integers(1, 16)),
    }
    held_against_the_rules(solver.answer("popularity", instance), instance)


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        (DEVICES | {"popularity": []}, ["popularity"]),
        (DEVICES | {"popularity": [1, -1]}, ["popularity", "at least 0"]),
        (DEVICES | {"popularity": [1, "x"]}, ["popularity"]),
        (DEVICES | {"popularity": [1e308, 1e308]}, ["popularity", "finite sum"]),
        ('{"popularity": [NaN], "devices": 1, "max_experts_per_device": 1}', ["popularity"]),
        (DEVICES | {"devices": 0}, ["devices"]),
        (DEVICES | {"devices": 1}, ["4 experts do not fit 1 devices", "take 2 devices or allow 4 experts"]),
        (DEVICES | {"devices": 2.5}, ["devices"]),
        (DEVICES | {"max_experts_per_device": 0}, ["max_experts_per_device"]),
        (DEVICES | {"algorithm": "first"}, ["algorithm"]),
        (DEVICES | {"gpus": 2}, ["gpus"]),
        ([DEVICES, DEVICES | {"devices": 1}], ["instance 1"]),
    ],
)
def test_a_malformed_hosting_is_one_line(solver, instance, parts):
    solver.refused("replicate-devices", instance, *parts)


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        (POPULARITY | {"train": []}, ["train"]),
        (POPULARITY | {"train": [[0, 1, 2], [0, 1]]}, ["train", "equal length"]),
        (POPULARITY | {"train": [[0, 1, 3]]}, ["train: token 0 names expert 3"]),
        (POPULARITY | {"train": [[0, 1, -1]]}, ["train: token 0 names expert -1"]),
        (POPULARITY | {"train": [[0, 1, 10**30]]}, ["train"]),
        (POPULARITY | {"test_prefix": []}, ["test_prefix"]),
        (POPULARITY | {"test_prefix": [[0]]}, ["paths", "2 layers"]),
        (POPULARITY | {"test_prefix": [[0, 5]]}, ["test_prefix: token 0 names expert 5"]),
        (POPULARITY | {"path_length": 3}, ["path_length: 3"]),
        (POPULARITY | {"layer": 2}, ["layer 2"]),
        (POPULARITY | {"layer": 0}, ["layer 0"]),
        (POPULARITY | {"top_k": 4}, ["top_k"]),
        (POPULARITY | {"devices": 0}, ["devices"]),
        ({name: value for name, value in POPULARITY.items() if name != "experts"}, ["experts"]),
    ],
)
def test_a_malformed_popularity_is_one_line(solver, instance, parts):
    solver.refused("popularity", instance, *parts)
