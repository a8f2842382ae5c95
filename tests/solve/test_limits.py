"""All kernels: an answer, stopped or not, is legal, has its objective and keeps its bound, by one certificate check. Sizes that
no time limit and no memory suffices for are one line before anything begins; smaller ones hear the clock."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.communication.relays import Domains, Relays
from engine.errors import InputError
from engine.network import Network
from engine.overlap.partition_axes import AxisConstraint, AxisProblem, count_axes
from engine.placement.affinity.bounds import spectral_limits
from engine.placement.assignment import Matching, bottleneck_assignment
from engine.placement.devices.search import search
from engine.result import Status, never
from engine.solve import KERNELS, Options, face, solve
from tests.cases.fuzzing import answer_or_one_line
from tests.cases.kernels import CHAIN, FOUR, INSTANCES, LAYER, REPLICATE, SPLIT, TWO_TIER
from tests.cases.placements import permutation_affinity, random_tokens
from tests.oracles.recomputed import MORE_IS_BETTER, held_against_the_rules


def larger() -> dict[str, dict[str, Any]]:
    """Instances with something to stop in the middle of; other kernels are asked with their small ones."""
    rng = np.random.default_rng(3)
    return INSTANCES | {
        "order": {"traffic": rng.integers(1, 10**6, (16, 16)).tolist(), "bandwidth": 1e6},
        "two-tier": TWO_TIER | {"traffic": rng.integers(1, 10**6, (8, 8)).tolist(), "gpus_per_node": 2},
        "assign": {"tokens": rng.integers(0, 50, (24, 24)).tolist()}
        | {name: rng.random(24).tolist() for name in ("bandwidth", "seconds_per_token")},
        "colocate": dict(zip(FOUR, rng.random((4, 40)).tolist(), strict=True)),
        "colocate-heterogeneous": {"cost": rng.random((8, 8, 8)).tolist()},
        "affinity": {"transitions": permutation_affinity(5, 12, 2000).tolist(), "gpus": 4, "gpus_per_node": 2},
        "coactivation": {"experts": random_tokens(1, 100, 12, 3, 0).tolist(), "source_gpu": [0, 1, 2, 3] * 25, "gpus": 4},
        "replicate": REPLICATE,
        "replicate-devices": {"popularity": rng.exponential(size=6).tolist(), "devices": 4, "max_experts_per_device": 3},
        "pipeline-degree": LAYER,
        "weight-gradients": SPLIT,
        "partition": {"ops": CHAIN["ops"][:3] * 10},
    }


LARGER = larger()


def answer_of(kernel: str, stop: Callable[[], bool], time_limit: float = 1.0, **options: Any) -> dict[str, Any]:
    """The answer of a kernel as `solve` gives it, but with a stop of our own."""
    schema, call = face(kernel)
    result, solution = call(schema.from_dict(LARGER[kernel], kernel), Options(time_limit=time_limit, **options), stop)
    return {"status": result.status.value, "objective": result.objective, "bound": result.bound, **solution}


@pytest.fixture(scope="module", params=KERNELS)
def unstopped(request) -> tuple[str, dict[str, Any]]:
    return request.param, answer_of(request.param, never)


def test_an_answer_is_legal_and_within_its_bound(unstopped):
    kernel, answer = unstopped
    held_against_the_rules(kernel, LARGER[kernel], answer, 1e-6 if kernel == "replicate" else 1e-9)


@pytest.mark.parametrize("after", [0, 1, 7, 60])
def test_a_stopped_answer_is_legal_and_its_bound_holds_for_the_unstopped_one(unstopped, after):
    kernel, full = unstopped
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    answer = answer_of(kernel, stop)
    held_against_the_rules(kernel, LARGER[kernel], answer, 1e-6 if kernel == "replicate" else 1e-9)
    slack = 1e-6 * abs(full["objective"])
    if kernel in MORE_IS_BETTER:
        assert answer["bound"] >= full["objective"] - slack and answer["objective"] <= full["bound"] + slack
    else:
        assert answer["bound"] <= full["objective"] + slack and answer["objective"] >= full["bound"] - slack
    if asked > after:
        assert answer["status"] == Status.CANCELLED or answer["bound"] == pytest.approx(answer["objective"], rel=1e-9)
    else:
        assert answer["status"] == full["status"]


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel not in ("affinity", "coactivation")])
def test_same_seed_same_answer(kernel):
    """Affinity and co-activation have the same check with their clocks set aside, in their own tests."""
    first, second = (answer_of(kernel, never, 60.0, seed=3, exact=False) for _ in range(2))
    assert first == second


WIDE = [[1.0] * 2049]
AXES = {"tensors": ["a", "b"], "allowed": [["x", "x"]] * 2**18}


@pytest.mark.parametrize(
    ("kernel", "instance"),
    [
        ("order", {"traffic": [[1.0]] * 1025, "bandwidth": 1}),
        ("two-tier", {"traffic": [[1.0]] * 1025, "bandwidth": 1, "link_bandwidth": 1, "gpus_per_node": 1}),
        ("two-tier", {"traffic": np.ones((130, 130)).tolist(), "bandwidth": 1, "link_bandwidth": 1, "gpus_per_node": 1}),
        ("assign", {"tokens": WIDE * 2049, "bandwidth": [1], "seconds_per_token": [1]}),
        ("colocate", dict.fromkeys(("send_a", "recv_a", "send_b", "recv_b"), WIDE[0])),
        ("colocate-heterogeneous", {"cost": [[[1.0]]] * 129}),
        ("affinity", {"transitions": [WIDE * 2049], "gpus": 1}),
        ("travel", INSTANCES["travel"] | {"gpus": 4096}),
        ("coactivation", {"experts": [[[0]]], "source_gpu": [0], "gpus": 1, "expert_count": 10**9}),
        ("coactivation", {"experts": [[[0]] * 2**17], "source_gpu": [0] * 2**17, "gpus": 1024}),
        ("replicate", {"load": [[1.0] * 8], "slots": 100_000, "gpus": 100_000}),
        ("replicate-devices", {"popularity": [1.0] * 4096, "devices": 4096, "max_experts_per_device": 4096}),
        ("weight-gradients", {"alltoall": [1.0] * 1025, "dw": [], "allowed": []}),
        ("partition", {"ops": [{"kind": "comp", "times": [1.0] * 2**10}] * 1025}),
        ("partition-axes", {"domains": {"a": ["x"], "b": ["x"]}, "constraints": [AXES, AXES]}),
        ("priority", {"alltoall": [[0.0, 1.0]] * 20_001, "allreduce": []}),
        ("pipeline-degree", {"max_degree": 10**9}),
    ],
)
def test_beyond_its_size_an_instance_is_one_line(kernel: str, instance: dict[str, Any]):
    line = answer_or_one_line(lambda: solve(kernel, instance, Options(time_limit=0.1)))
    assert isinstance(line, str) and line.startswith(f"{kernel}: ")


@pytest.mark.parametrize(
    ("kernel", "instance"),
    [
        ("replicate", {"load": [[1.0] * 8], "slots": 10_000, "gpus": 2}),
        ("replicate-devices", {"popularity": [1.0 / n for n in range(1, 257)], "devices": 256, "max_experts_per_device": 256}),
    ],
)
def test_many_slots_are_not_searched_in_a_table_of_gigabytes(kernel, instance):
    answer = answer_or_one_line(lambda: solve(kernel, instance, Options(time_limit=0.5, exact=False)))
    assert answer["status"] in ("OPTIMAL", "FEASIBLE", "TIME_LIMIT")


def test_nodes_of_unlike_sizes_take_no_table_of_the_largest():
    sizes = [400, *[1] * 400]
    node = np.repeat(np.arange(len(sizes)), sizes)
    rate = np.ones(len(node))
    network = Network(rate, rate, rate, node, 0.0, np.zeros(len(node)))
    with pytest.raises(InputError, match="more memory than there may be"):
        Relays.of(np.ones((len(node), len(node))), Domains.of(network))


# The clock


def after(questions: int):
    """A `stop` that answers True from so many questions on."""
    asked = iter(range(questions))
    return lambda: next(asked, None) is None


def test_a_matching_is_given_up_between_its_paths():
    weight = np.ones((50, 50))
    assert Matching(weight, weight, after(10)).fit(1.0, 1.0) is None
    assert Matching(weight, weight, after(10_000)).fit(1.0, 1.0) is True
    rng = np.random.default_rng(0)
    weight, known = rng.random((60, 60)), np.arange(60)
    best, bound = bottleneck_assignment(weight, known, after(30))
    assert bound <= weight[known, best].max() <= weight[known, known].max()


def test_replicas_are_dealt_while_there_is_time():
    weight = np.linspace(1, 2, 30)
    hosts = search(weight, 20, 30, 0, 0, 0.0, after(5), lambda worst: None)
    assert (hosts.sum(axis=1) >= 1).all() and hosts.sum() < 20 * 30


def test_without_time_for_spectra_the_largest_counts_limit_what_is_kept():
    counts = np.random.default_rng(0).random((2, 12, 12))
    quick = spectral_limits(counts, 4, deadline=time.perf_counter())
    slow = spectral_limits(counts, 4)
    assert (slow <= quick).all() and (quick < counts.sum(axis=(1, 2))).all()


def test_counting_axes_is_given_up_between_joins():
    table = AxisConstraint(("a", "b"), (("x", "x"), ("y", "y")))
    problem = AxisProblem({"a": ("x", "y"), "b": ("x", "y")}, [table] * 20)
    assert count_axes(problem, after(5)) is None and count_axes(problem) == 2
