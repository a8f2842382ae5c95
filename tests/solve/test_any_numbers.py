"""Instances with numbers that no machine has: an answer in finite numbers or one clear line, in time."""

import copy
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.solve import KERNELS, Options, solve
from tests.formats.fuzzing import EXAMPLES

INSTANCES: dict[str, dict[str, Any]] = {
    "order": {"traffic": [[0, 3, 1], [2, 0, 4], [1, 1, 0]], "bandwidth": [1, 2, 3], "mode": "matched"},
    "two-tier": {
        "traffic": [[0, 0, 8, 0], [0, 0, 1, 0], [0, 3, 0, 0], [0, 2, 0, 0]],
        "bandwidth": 1,
        "link_bandwidth": 9,
        "gpus_per_node": 2,
    },
    "assign": {"tokens": [[9, 1], [1, 9]], "bandwidth": [1, 2], "seconds_per_token": [0.1, 0.2]},
    "colocate": {"send_a": [1, 2, 3], "recv_a": [2, 1, 3], "send_b": [4, 1, 2], "recv_b": [1, 3, 3]},
    "colocate-heterogeneous": {"cost": [[[1, 2], [3, 4]], [[2, 1], [4, 3]]]},
    "affinity": {"transitions": [[[5, 1, 2, 1], [1, 5, 3, 1], [0, 1, 2, 3], [4, 4, 1, 1]]], "gpus": 2},
    "travel": {
        "experts": [[0, 2], [1, 3]],
        "source_gpu": [0, 1],
        "gpu_of_expert": [0, 0, 1, 1],
        "gpus": 2,
        "gpus_per_node": 1,
        "travel": "gpu",
    },
    "coactivation": {"experts": [[[0, 2], [1, 3], [2, 0], [1, 3]]], "source_gpu": [0, 0, 1, 1], "gpus": 2, "cap": 1.1},
    "replicate": {"load": [[5, 3, 2, 1]], "slots": 6, "gpus": 2, "split": "equal"},
    "replicate-devices": {"popularity": [0.5, 0.3, 0.2], "devices": 3, "max_experts_per_device": 2},
    "pipeline-degree": {
        "alpha_comm": 0.1,
        "beta_comm": 0.2,
        "size_comm": 5,
        "alpha_comp": 0.1,
        "beta_comp": 0.3,
        "size_comp": 4,
        "max_degree": 8,
    },
    "weight-gradients": {"alltoall": [1, 2], "dw": [0.5, 1, 0.7], "allowed": [[1, 1], [0, 1], [1, 0]]},
    "partition": {"ops": [{"kind": "comp", "times": [1, 0.6, 0.4]}, {"kind": "comm", "times": [2, 1.1, 0.8]}]},
    "partition-axes": {"domains": {"a": ["E", "C"], "b": ["E"]}, "constraints": [], "count": True},
    "priority": {"alltoall": [[0, 1], [2, 1]], "allreduce": [[0.5, 3]], "micro_op": 0.5},
    "popularity": {
        "train": [[0, 1], [1, 0], [0, 1]],
        "test_prefix": [[0], [1]],
        "path_length": 1,
        "top_k": 1,
        "layer": 0,
        "experts": 2,
        "devices": 2,
    },
}
EXTREMES = (
    0,
    1,
    -1,
    0.5,
    1e-9,
    1e9,
    1e18,
    1e-30,
    1e30,
    5e-324,
    1e-300,
    1e300,
    1.7e308,
    2**31,
    2**63,
    10**30,
    True,
    None,
)
LIMIT = 1.0


def places(data: Any, place: tuple = ()) -> Iterator[tuple]:
    """Of every number in plain data."""
    if isinstance(data, dict | list):
        for key, part in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(part, (*place, key))
    elif isinstance(data, int | float):
        yield place


def numbers(data: Any) -> Iterator[float]:
    if isinstance(data, dict | list | tuple):
        for part in data.values() if isinstance(data, dict) else data:
            yield from numbers(part)
    elif isinstance(data, int | float):
        yield data


def test_every_kernel_has_an_instance():
    assert set(INSTANCES) == set(KERNELS)
    for kernel, instance in INSTANCES.items():  # which also compiles them: no part of the times below
        assert math.isfinite(solve(kernel, instance, Options(time_limit=LIMIT))["objective"])


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
        answer = solve(kernel, instance, Options(time_limit=LIMIT, seed=seed))
        assert all(map(math.isfinite, numbers(answer)))
        json.dumps(answer, allow_nan=False)
    except InputError as error:
        assert "\n" not in str(error)
    assert time.process_time() - began < LIMIT + 2


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
    schema, function = KERNELS["order"]

    def broken(*arguments):
        result, solution = function(*arguments)
        return result, solution | {"phases": [{"duration": math.nan, "sends": []}]}

    monkeypatch.setitem(KERNELS, "order", (schema, broken))
    with pytest.raises(InputError, match="too far apart"):
        solve("order", INSTANCES["order"], Options())


def test_a_seed_is_what_solvers_take():
    with pytest.raises(InputError, match="seed: Input should be less than 2147483648"):
        Options.from_dict({"seed": 10**30}, "--options")


def test_small_counts_beside_large_ones_are_not_lost():
    """Hops that leave were what there is less what stays: 0 beside 1e18, and a bound of 0 proved it."""
    counts = [[1e18, 1, 2, 1], [1, 5, 3, 1], [0, 1, 2, 3], [4, 4, 1, 1]]
    answer = solve("affinity", {"transitions": [counts], "gpus": 2}, Options(time_limit=LIMIT))
    first, second = answer["gpu_of_expert"]
    leave = sum(counts[a][b] for a in range(4) for b in range(4) if first[a] != second[b])
    assert answer["objective"] == answer["gpu_hops"] == leave > 0 and answer["bound"] <= leave


def test_a_name_that_cannot_be_printed_is_no_part_of_a_line():
    with pytest.raises(InputError, match="partition-axes: domains → \ufffd: Input should be a valid tuple") as caught:
        solve("partition-axes", {"domains": {"\x01": None}}, Options())
    assert str(caught.value).isprintable()
