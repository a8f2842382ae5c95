"""Instances of every kernel of `solve`: a small legal one each, and strategies for any."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

ORDER = {"traffic": [[0, 1], [2, 0]], "bandwidth": 1}
ASSIGN = {"tokens": [[0, 1], [2, 0]], "bandwidth": [1, 1], "seconds_per_token": [1, 1]}
FOUR = ("send_a", "recv_a", "send_b", "recv_b")
PAIRS = {name: [1, 2] for name in FOUR}
TRIPLES = {"cost": [[[1, 2], [3, 4]], [[4, 3], [2, 1]]]}
AFFINITY = {"transitions": [[[5, 1, 0, 2], [0, 7, 1, 0], [3, 0, 4, 1], [0, 2, 1, 6]]], "gpus": 2}
COACTIVATION = {"experts": [[[0, 2], [1, 3], [2, 0], [1, 3], [0, -1]]], "source_gpu": [0, 0, 1, 1, 0], "gpus": 2}
DEVICES = {"popularity": [0.5, 0.2, 0.2, 0.1], "devices": 3, "max_experts_per_device": 2}
POPULARITY = {"train": [[0, 1, 2], [0, 1, 2], [0, 1, 0], [1, 0, 1]], "test_prefix": [[0, 1], [1, 1]], "path_length": 2}
POPULARITY |= {"top_k": 1, "layer": 1, "experts": 3, "devices": 6}
LOAD = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
REPLICATE = {"load": LOAD, "slots": 16, "gpus": 8}
TIMES = ("alpha_comm", "beta_comm", "size_comm", "alpha_comp", "beta_comp", "size_comp")
LAYER = dict(zip(TIMES, (2e-4, 3.5e-10, 4e7, 1.2e-4, 8e-14, 1.6e11), strict=True)) | {"max_degree": 24}
GRADIENTS = {"alltoall": [10, 10], "dw": [9, 10], "allowed": [[1, 0], [1, 1]]}
CHAIN = {
    "ops": [
        {"kind": "comp", "times": [2, 1]},
        {"kind": "comm", "times": [4, 2.25]},
        {"kind": "comp", "times": [2, 1.5]},
        {"kind": "comp", "times": [1, None]},
    ]
}
AXES = {
    "domains": {"x": [0, -1], "w": [-1, 1], "y": [0, 1], "z": [0, 1]},
    "constraints": [
        {"tensors": ["x", "w", "y"], "allowed": [[0, -1, 0], [-1, 1, 1]]},
        {"tensors": ["y", "z"], "allowed": [[0, 0], [1, 1]]},
    ],
}
SPLIT = {"alltoall": [8, 7, 9], "dw": [6, 6, 9, 4], "allowed": [[1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]}
PRIORITY = {"alltoall": [[2, 3]], "allreduce": [[0, 5]]}
TRAVEL = {
    "experts": [[0, 2, 3], [1, 3, -1]],
    "source_gpu": [1, 2],
    "gpu_of_expert": [0, 1, 2, 3],
    "gpus": 4,
    "gpus_per_node": 2,
}
TWO_TIER = {"traffic": [[0, 3, 1, 0], [2, 0, 0, 0], [1, 1, 0, 5], [0, 9, 2, 0]], "bandwidth": 1, "link_bandwidth": 9}
"""Instances with answers that follow by hand, and that malformed ones are made from."""

INSTANCES: dict[str, dict[str, Any]] = {
    "order": {"traffic": [[0, 3, 1], [2, 0, 4], [1, 1, 0]], "bandwidth": [1, 2, 3], "mode": "matched"},
    "two-tier": TWO_TIER | {"traffic": [[0, 0, 8, 0], [0, 0, 1, 0], [0, 3, 0, 0], [0, 2, 0, 0]], "gpus_per_node": 2},
    "assign": {"tokens": [[9, 1], [1, 9]], "bandwidth": [1, 2], "seconds_per_token": [0.1, 0.2]},
    "colocate": {"send_a": [1, 2, 3], "recv_a": [2, 1, 3], "send_b": [4, 1, 2], "recv_b": [1, 3, 3]},
    "colocate-heterogeneous": {"cost": [[[1, 2], [3, 4]], [[2, 1], [4, 3]]]},
    "affinity": {"transitions": [[[5, 1, 2, 1], [1, 5, 3, 1], [0, 1, 2, 3], [4, 4, 1, 1]]], "gpus": 2},
    "travel": {"experts": [[0, 2], [1, 3]], "source_gpu": [0, 1], "gpu_of_expert": [0, 0, 1, 1], "travel": "gpu"}
    | {"gpus": 2, "gpus_per_node": 1},
    "coactivation": {"experts": [[[0, 2], [1, 3], [2, 0], [1, 3]]], "source_gpu": [0, 0, 1, 1], "gpus": 2, "cap": 1.1},
    "replicate": {"load": [[5, 3, 2, 1]], "slots": 6, "gpus": 2, "split": "equal"},
    "replicate-devices": {"popularity": [0.5, 0.3, 0.2], "devices": 3, "max_experts_per_device": 2},
    "pipeline-degree": dict(zip(TIMES, (0.1, 0.2, 5, 0.1, 0.3, 4), strict=True)) | {"max_degree": 8},
    "weight-gradients": {"alltoall": [1, 2], "dw": [0.5, 1, 0.7], "allowed": [[1, 1], [0, 1], [1, 0]]},
    "partition": {"ops": [{"kind": "comp", "times": [1, 0.6, 0.4]}, {"kind": "comm", "times": [2, 1.1, 0.8]}]},
    "partition-axes": {"domains": {"a": ["E", "C"], "b": ["E"]}, "constraints": [], "count": True},
    "priority": {"alltoall": [[0, 1], [2, 1]], "allreduce": [[0.5, 3]], "micro_op": 0.5},
    "popularity": {"train": [[0, 1], [1, 0], [0, 1]], "test_prefix": [[0], [1]]}
    | {"path_length": 1, "top_k": 1, "layer": 0, "experts": 2, "devices": 2},
}
EXTREMES = (0, 1, -1, 0.5, 1e-9, 1e9, 1e18, 1e-30, 1e30, 5e-324, 1e-300, 1e300, 1.7e308, 2**31, 2**63, 10**30, True, None)
"""Numbers that no machine has."""


def places(data: Any, place: tuple = ()) -> Iterator[tuple]:
    """The places of all numbers in plain data: keys and indices from the outside in."""
    if isinstance(data, dict | list):
        for key, part in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(part, (*place, key))
    elif isinstance(data, int | float):
        yield place


def numbers(data: Any) -> Iterator[float]:
    """All numbers in plain data."""
    if isinstance(data, dict | list | tuple):
        for part in data.values() if isinstance(data, dict) else data:
            yield from numbers(part)
    elif isinstance(data, int | float):
        yield data


def gradients_of(problem: Any) -> dict[str, Any]:
    """A `WeightGradientInstance` as JSON."""
    kinds = {"alltoall": float, "dw": float, "allowed": int}
    return {name: getattr(problem, name).astype(kind).tolist() for name, kind in kinds.items()}


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
            return {name: table(n) for name in FOUR}
        case "colocate-heterogeneous":
            n = min(n, 6)
            return {"cost": table(n, n, n)}
        case "affinity":
            nodes = {"gpus_per_node": draw(st.sampled_from([part for part in (1, 2, 4) if gpus % part == 0]))}
            costs = {"cost_gpu": draw(st.sampled_from((0, 1, 2.5))), "cost_node": draw(st.sampled_from((0, 1, 9)))}
            more = (nodes if draw(st.booleans()) else {}) | costs | {"staged": draw(st.booleans())}
            return {"transitions": table(draw(st.integers(1, 4)), experts, experts), "gpus": gpus} | more
        case "travel" | "coactivation":
            sizes = {"gpus": gpus, "gpus_per_node": draw(st.sampled_from([part for part in (1, 2, 4) if gpus % part == 0]))}
            if kernel == "travel":
                rows = {"experts": ids(draw, -1, experts, n, draw(st.integers(1, 3))), "source_gpu": ids(draw, 0, gpus, n)}
                unit = draw(st.sampled_from(("copies", "gpu", "node")))
                return sizes | rows | {"gpu_of_expert": ids(draw, 0, gpus, experts), "travel": unit}
            shape = draw(st.integers(1, 2)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
            rows = {"experts": ids(draw, -1, experts, *shape), "source_gpu": ids(draw, 0, gpus, shape[1])}
            rules = {"travel": draw(st.sampled_from(("gpu", "node"))), "cap": draw(st.sampled_from((None, 1.0, 1.3)))}
            return sizes | rows | rules | {"expert_count": experts}
        case "replicate":
            several = draw(st.booleans())
            layers = draw(st.integers(1, 3))
            slots = experts + gpus * draw(st.integers(0, 3))
            load = {"loads": [table(layers, experts) for _ in range(2)]} if several else {"load": table(layers, experts)}
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
            prefix = ids(draw, 0, experts, draw(st.integers(1, 5)), path)
            sizes = {"path_length": path, "layer": layer, "experts": experts, "devices": gpus}
            top_k = draw(st.integers(1, min(3, experts)))
            return sizes | {"train": ids(draw, 0, experts, n, layers), "test_prefix": prefix, "top_k": top_k}
        case "pipeline-degree":
            way = draw(st.sampled_from((("dispatch-first", 1), ("dispatch-first", 2), ("interleaved", 1))))
            return dict(zip(TIMES, table(6), strict=True)) | {"max_degree": n, "order": way[0], "streams": way[1]}
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
