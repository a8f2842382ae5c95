"""Any JSON for `solve`: an answer whose objective the validators recompute and whose bound is on its right side, or one line,
within the seconds and the bytes of `tests.formats.fuzzing`."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.solve import KERNELS, Options, solve
from tests.formats.fuzzing import EXAMPLES, answer_or_one_line, any_input
from tests.formats.mutations import VALUES, mutated
from tests.solve.recomputed import MORE_IS_BETTER, RECOMPUTED
from tests.solve.test_any_numbers import EXTREMES, INSTANCES, numbers, places

pytestmark = pytest.mark.slow

LIMIT = 0.3
FAIR = 1e-60, 1e60
"""Sizes of numbers whose products and sums have all their digits."""
ROUND_OFF = 1e-6
SHARES = st.sampled_from((0.0, 0.3, 1.0))
seeds = st.integers(0, 2**32 - 1)


@st.composite
def tables(draw: st.DrawFn, *shape: int, least: float = 0.0) -> list:
    """Numbers of one of several kinds: whole, of widely different sizes, or all alike."""
    rng = np.random.default_rng(draw(seeds))
    match draw(st.sampled_from(("whole", "wide", "alike"))):
        case "whole":
            table = rng.integers(0, 9, shape).astype(float)
        case "wide":
            table = 10.0 ** rng.uniform(-12, 12, shape)
        case _:
            table = np.full(shape, draw(st.sampled_from((0.0, 1.0, 1e9))))
    table *= rng.random(shape) >= draw(SHARES) * 0.5
    return np.maximum(table, least).tolist()


def ids(draw: st.DrawFn, least: int, count: int, *shape: int) -> list:
    return np.random.default_rng(draw(seeds)).integers(least, count, shape).tolist()


@st.composite
def instances(draw: st.DrawFn, kernel: str) -> dict[str, Any]:
    """A legal instance, of up to some dozens of GPUs, experts or operators."""
    n = draw(st.integers(1, 12))
    gpus = draw(st.sampled_from((1, 2, 4)))
    experts = gpus * draw(st.integers(1, 4))

    def table(*shape: int, least: float = 0.0) -> list:
        return draw(tables(*shape, least=least))

    match kernel:
        case "order":
            rate = draw(st.sampled_from((1.0, 1e9))) if draw(st.booleans()) else table(n, least=1e-3)
            return {"traffic": table(n, n), "bandwidth": rate, "mode": draw(st.sampled_from(("matched", "shared")))}
        case "two-tier":
            size, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
            n = size * nodes
            rates = {"bandwidth": table(n, least=1e-3), "link_bandwidth": table(n, least=1e-3)}
            return {"traffic": table(n, n), "gpus_per_node": size} | rates
        case "assign":
            return {"tokens": table(n, n), "bandwidth": table(n, least=1e-3), "seconds_per_token": table(n)}
        case "colocate":
            return {name: table(n) for name in ("send_a", "recv_a", "send_b", "recv_b")}
        case "colocate-heterogeneous":
            n = min(n, 6)
            return {"cost": table(n, n, n)}
        case "affinity":
            nodes = {"gpus_per_node": draw(st.sampled_from([part for part in (1, 2, 4) if gpus % part == 0]))}
            costs = {"cost_gpu": draw(st.sampled_from((0, 1, 2.5))), "cost_node": draw(st.sampled_from((0, 1, 9)))}
            more = (nodes if draw(st.booleans()) else {}) | costs | {"staged": draw(st.booleans())}
            return {"transitions": table(draw(st.integers(1, 4)), experts, experts), "gpus": gpus} | more
        case "travel":
            size = draw(st.sampled_from([part for part in (1, 2, 4) if gpus % part == 0]))
            return {
                "experts": ids(draw, -1, experts, n, draw(st.integers(1, 3))),
                "source_gpu": ids(draw, 0, gpus, n),
                "gpu_of_expert": ids(draw, 0, gpus, experts),
                "gpus": gpus,
                "gpus_per_node": size,
                "travel": draw(st.sampled_from(("copies", "gpu", "node"))),
            }
        case "coactivation":
            size = draw(st.sampled_from([part for part in (1, 2, 4) if gpus % part == 0]))
            shape = draw(st.integers(1, 2)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
            return {
                "experts": ids(draw, -1, experts, *shape),
                "source_gpu": ids(draw, 0, gpus, shape[1]),
                "gpus": gpus,
                "gpus_per_node": size,
                "travel": draw(st.sampled_from(("gpu", "node"))),
                "cap": draw(st.sampled_from((None, 1.0, 1.3))),
                "expert_count": experts,
            }
        case "replicate":
            several = draw(st.booleans())
            layers = draw(st.integers(1, 3))
            slots = experts + gpus * draw(st.integers(0, 3))
            load = (
                {"loads": [table(layers, experts) for _ in range(2)]} if several else {"load": table(layers, experts)}
            )
            split = draw(st.sampled_from(("equal", "free")))
            speed = {"speed": table(gpus, least=0.5)} if draw(st.booleans()) else {}
            return load | {"slots": slots, "gpus": gpus, "split": split} | speed
        case "replicate-devices":
            room = draw(st.integers(0, 3)) - (-n // gpus)
            return {"popularity": table(n), "devices": gpus, "max_experts_per_device": room}
        case "popularity":
            layers = draw(st.integers(2, 4))
            layer = draw(st.integers(0, layers - 2))
            path = draw(st.integers(1, layer + 1))
            return {
                "train": ids(draw, 0, experts, n, layers),
                "test_prefix": ids(draw, 0, experts, draw(st.integers(1, 5)), path),
                "path_length": path,
                "top_k": draw(st.integers(1, min(3, experts))),
                "layer": layer,
                "experts": experts,
                "devices": gpus,
            }
        case "pipeline-degree":
            names = ("alpha_comm", "beta_comm", "size_comm", "alpha_comp", "beta_comp", "size_comp")
            way = draw(st.sampled_from((("dispatch-first", 1), ("dispatch-first", 2), ("interleaved", 1))))
            return dict(zip(names, table(6), strict=True)) | {"max_degree": n, "order": way[0], "streams": way[1]}
        case "weight-gradients":
            m = draw(st.integers(0, 5))
            allowed = ids(draw, 0, 2, n, m) if m else [[]] * n
            return {"alltoall": table(m), "dw": table(n), "allowed": allowed}
        case "partition":
            parts = draw(st.integers(1, 4))
            kinds = draw(st.lists(st.sampled_from(("comp", "comm")), min_size=n, max_size=n))
            return {"ops": [{"kind": kind, "times": times} for kind, times in zip(kinds, table(n, parts), strict=True)]}
        case "partition-axes":
            axes = ["B", "E", 0][: draw(st.integers(1, 3))]
            names = [f"t{place}" for place in range(n)]
            picked = draw(st.lists(st.tuples(*[st.sampled_from(names)] * 2), max_size=6))
            pairs = [[a, b] for a in axes for b in axes]
            allowed = st.lists(st.sampled_from(pairs), min_size=1, max_size=5)
            constraints = [{"tensors": list(pair), "allowed": draw(allowed)} for pair in picked]
            return {"domains": dict.fromkeys(names, axes), "constraints": constraints, "count": draw(st.booleans())}
        case "priority":
            network = {name: table(draw(st.integers(0, 5)), 2) for name in ("alltoall", "allreduce")}
            policy = draw(st.sampled_from(("priority", "fair", "fifo")))
            return network | {"policy": policy, "overhead": draw(st.sampled_from((0, 0.5)))}
    raise AssertionError(f"{kernel} has no instances here")


@st.composite
def odd(draw: st.DrawFn, kernel: str) -> Any:
    """Any JSON near an instance: numbers that no machine has, other types, parts that are missing or there twice."""
    structure = draw(st.one_of(st.just(INSTANCES[kernel]), instances(kernel)))
    values = st.one_of(VALUES, st.sampled_from(EXTREMES))
    return draw(st.one_of(mutated(structure, values), mutated(structure, values), VALUES))


def options(draw: st.DrawFn) -> Options:
    return Options(time_limit=LIMIT, seed=draw(st.integers(0, 3)), exact=draw(st.booleans()))


def is_fair(instance: Any) -> bool:
    """Whether all numbers are such that round-off is what it usually is."""
    return all(not number or FAIR[0] < abs(number) < FAIR[1] for number in numbers(instance))


def held(kernel: str, instance: dict, answer: dict) -> None:
    """Finite, legal, worth what it says, and with the bound on the side where nothing is better."""
    assert all(map(math.isfinite, numbers(answer)))
    if not is_fair(instance):
        return
    worth, claimed, bound = RECOMPUTED[kernel](instance, answer), answer["objective"], answer["bound"]
    slack = ROUND_OFF * max(abs(worth), abs(claimed))
    if kernel == "priority":  # a difference of moments
        slack = ROUND_OFF * (1 + answer["finish"])
    assert abs(worth - claimed) <= slack, (worth, claimed)
    assert bound >= claimed - slack if kernel in MORE_IS_BETTER else bound <= claimed + slack
    if answer["status"] == "OPTIMAL":
        assert abs(bound - claimed) <= max(slack, 1e-5 * abs(claimed))


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


FINDS = {
    "free hops to other nodes": (
        "affinity",
        {
            "transitions": [[[1 + (7 * a + 3 * b) % 8 for b in range(12)] for a in range(12)]],
            "gpus": 4,
            "gpus_per_node": 2,
            "cost_gpu": 1,
            "cost_node": 0,
        },
    ),
    "speeds too far apart for whole numbers": (
        "replicate",
        {
            "load": [[7.0, 5.0, 4.0, 2.0]],
            "slots": 8,
            "gpus": 4,
            "split": "equal",
            "speed": [42987930071.348236, 1.8700846589562221, 269059875552.10046, 0.5],
        },
    ),
    "counts that are lost beside another": (
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
