"""Any JSON for `solve`: an answer of finite numbers that the checks recompute, with its bound on the right side, or one
line, in time and within the memory that `tests.cases.fuzzing` allows."""

import copy
import json
import math
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.solve import KERNELS, Options, face, solve
from engine.solve.scheduling import FACES
from tests.cases.fuzzing import EXAMPLES, answer_or_one_line, any_input
from tests.cases.kernels import EXTREMES, INSTANCES, instances, numbers, places
from tests.cases.mutations import VALUES, mutated
from tests.oracles.recomputed import held_against_the_rules

LIMIT, EXTREME_LIMIT = 0.3, 1.0
FAIR = 1e-60, 1e60
"""Range of numbers that can be multiplied and added without losing digits."""
ROUND_OFF = 1e-6


@st.composite
def odd(draw: st.DrawFn, kernel: str) -> Any:
    """Any JSON near an instance: numbers that no machine has, other types, parts that are missing or there twice."""
    structure = draw(st.one_of(st.just(INSTANCES[kernel]), instances(kernel)))
    values = st.one_of(VALUES, st.sampled_from(EXTREMES))
    return draw(st.one_of(mutated(structure, values), mutated(structure, values), VALUES))


def options(draw: st.DrawFn) -> Options:
    return Options(time_limit=LIMIT, seed=draw(st.integers(0, 3)), exact=draw(st.booleans()))


def held(kernel: str, instance: dict, answer: dict) -> None:
    """Check an answer; its objective only if round-off is as usual for the numbers of the instance."""
    assert all(map(math.isfinite, numbers(answer)))
    if all(not number or FAIR[0] < abs(number) < FAIR[1] for number in numbers(instance)):
        held_against_the_rules(kernel, instance, answer, ROUND_OFF)


def test_every_kernel_has_an_instance():
    assert set(INSTANCES) == set(KERNELS)
    for kernel, instance in INSTANCES.items():  # compiles the kernels too, which is no part of the times below
        assert math.isfinite(solve(kernel, instance, Options(time_limit=EXTREME_LIMIT))["objective"])


@pytest.mark.parametrize("kernel", KERNELS)
@given(data=st.data())
@settings(any_input, max_examples=EXAMPLES // 2)
def test_any_instance(kernel, data):
    instance = data.draw(instances(kernel))
    answer = answer_or_one_line(lambda: solve(kernel, instance, options(data.draw)))
    assert not isinstance(answer, str), answer
    held(kernel, instance, answer)


@pytest.mark.parametrize("kernel", KERNELS)
@given(data=st.data())
@any_input
def test_any_json(kernel, data):
    instance = data.draw(odd(kernel))
    assume(list(places(instance)) or not isinstance(instance, list))
    answer = answer_or_one_line(lambda: solve(kernel, instance, options(data.draw)))
    for each in answer if isinstance(answer, list) else [answer]:
        if isinstance(each, dict) and isinstance(instance, dict):
            held(kernel, instance, each)


@pytest.mark.parametrize("kernel", INSTANCES)
@given(data=st.data(), seed=st.sampled_from([0, 0, 2**31 - 1]))
@settings(max_examples=EXAMPLES // 3, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_numbers(kernel, data, seed):
    instance = copy.deepcopy(INSTANCES[kernel])
    every = list(places(instance))
    for place in data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=3, unique=True)):
        part = instance
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = data.draw(st.sampled_from(EXTREMES))
    began = time.process_time()
    try:
        answer = solve(kernel, instance, Options(time_limit=EXTREME_LIMIT, seed=seed))
        assert all(map(math.isfinite, numbers(answer)))
        json.dumps(answer, allow_nan=False)
    except InputError as error:
        assert "\n" not in str(error)
    assert time.process_time() - began < EXTREME_LIMIT + 2


FINDS = {
    "free hops to other nodes": (
        "affinity",
        {"transitions": [[[1 + (7 * a + 3 * b) % 8 for b in range(12)] for a in range(12)]], "gpus": 4, "gpus_per_node": 2}
        | {"cost_gpu": 1, "cost_node": 0},
    ),
    "speeds too far apart for whole numbers": (
        "replicate",
        {"load": [[7.0, 5.0, 4.0, 2.0]], "slots": 8, "gpus": 4, "split": "equal"}
        | {"speed": [42987930071.348236, 1.8700846589562221, 269059875552.10046, 0.5]},
    ),
    "small counts beside large ones": (
        "assign",
        {"tokens": [[3.0, 5.0], [1e18, 1.0]], "bandwidth": [7.0, 0.001], "seconds_per_token": [7.0, 0.0]},
    ),
}


@pytest.mark.parametrize("find", FINDS)
def test_finds(find):
    kernel, instance = FINDS[find]
    answer = answer_or_one_line(lambda: solve(kernel, instance, Options(time_limit=LIMIT, seed=0, exact=True)))
    assert not isinstance(answer, str), answer
    held(kernel, instance, answer)


@pytest.mark.parametrize(
    ("kernel", "change"),
    [
        ("two-tier", {"link_bandwidth": 5e-324}),  # seconds that are infinite
        ("two-tier", {"bandwidth": 1e300}),  # bytes of a phase that are infinite
        ("affinity", {"transitions": [[[1.7e308, 1.7e308], [1.7e308, 1.7e308]]]}),  # hops that are infinite
    ],
)
def test_numbers_too_far_apart_are_refused(kernel, change):
    with pytest.raises(InputError, match=f"^{kernel}: its numbers are too far apart, or too large"):
        solve(kernel, INSTANCES[kernel] | change, Options())


def test_answers_that_are_no_number_are_refused(monkeypatch):
    schema, call = face("order")

    def broken(*arguments):
        result, solution = call(*arguments)
        return result, solution | {"phases": [{"duration": math.nan, "sends": []}]}

    monkeypatch.setitem(FACES, "order", (schema, broken))
    with pytest.raises(InputError, match="too far apart"):
        solve("order", INSTANCES["order"], Options())


def test_small_counts_beside_large_ones_are_not_lost():
    """The hops that leave were computed as all hops less those that stay: 0 next to 1e18, with a bound of 0."""
    counts = [[1e18, 1, 2, 1], [1, 5, 3, 1], [0, 1, 2, 3], [4, 4, 1, 1]]
    answer = solve("affinity", {"transitions": [counts], "gpus": 2}, Options(time_limit=EXTREME_LIMIT))
    first, second = answer["gpu_of_expert"]
    leave = sum(counts[a][b] for a in range(4) for b in range(4) if first[a] != second[b])
    assert answer["objective"] == answer["gpu_hops"] == leave > 0 and answer["bound"] <= leave


def test_a_name_that_cannot_be_printed_is_no_part_of_a_line():
    with pytest.raises(InputError, match="partition-axes: domains → \ufffd: Input should be a valid tuple") as caught:
        solve("partition-axes", {"domains": {"\x01": None}}, Options())
    assert str(caught.value).isprintable()
