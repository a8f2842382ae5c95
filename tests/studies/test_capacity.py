"""How many GPUs for a target: against every size tried by hand."""

from dataclasses import replace

import numpy as np
import pytest

from engine.catalogue import cluster_presets
from engine.cluster import Cluster, Efficiency, Node
from engine.compare.capacity import CapacityPoint, capacity, fitted, grown, ladder, most_gpus, parts_of, smallest
from engine.costs import Datasheet
from engine.errors import InputError
from engine.problem import Problem, make_problem
from engine.systems import SYSTEMS, run
from engine.workload import RoutingTrace, TrafficMatrix
from tests.strategies import make_gpu, make_model
from tests.studies.test_what_if import step_problem


def problem_of(memory: float = 1e9, per_node: int = 1) -> Problem:
    nodes = (
        Node(name="one", gpus=(make_gpu(memory=memory),) * per_node),
        Node(name="two", gpus=(make_gpu(1, send=5e5, memory=memory),) * per_node),
    )
    rng = np.random.default_rng(1)
    experts = rng.zipf(1.5, (300, 2, 1)).clip(1, 6).astype(np.int16) - 1
    trace = RoutingTrace("six", experts, 6, source_rank=rng.integers(0, 2, 300).astype(np.int32))
    return make_problem(trace, Cluster(name="two", nodes=nodes, latency=2e-4), make_model(2, 6, d_ff=800), Datasheet())


def by_hand(problem: Problem, part, most: int) -> list[float]:
    return [
        run(SYSTEMS["linear"], fitted(problem, grown(problem.cluster, part, count)), {}).result.objective
        for count in range(1, most + 1)
    ]


@pytest.mark.parametrize("kind", range(3))
def test_the_smallest_size_is_that_of_trying_all(kind: int) -> None:
    problem = problem_of()
    part = list(parts_of(problem.cluster).values())[kind]
    times = by_hand(problem, part, 8 // len(part))
    for target in sorted({*times, 0.9 * min(times), 1.1 * max(times), float(np.median(times))}):
        points = list(capacity(problem, part, target, range(1, len(times) + 1), "linear"))
        first = next((place for place, seconds in enumerate(times) if seconds <= target), None)
        point = smallest(points, target)
        assert (point.parts if point else None) == (None if first is None else first + 1)
        assert [point.total for point in points] == times
        assert all(point.gpus == point.parts * sum(len(node.gpus) for node in part) for point in points)


@pytest.mark.parametrize(
    ("smallest_that_meets", "between"),
    [(1, [1]), (2, [1]), (3, [3, 4]), (5, [3, 4]), (6, [6, 7]), (8, [6, 7]), (9, [])],
)
def test_sizes_between_are_tried_until_the_smallest_is_known(monkeypatch, smallest_that_meets, between) -> None:
    def point_of_size(common, index, stop, report) -> CapacityPoint:
        count = common[1][index]
        return CapacityPoint(count, count, 1.0 / count)

    monkeypatch.setattr("engine.compare.capacity._point_of_size", point_of_size)
    problem, said = problem_of(), []
    part = next(iter(parts_of(problem.cluster).values()))
    report = lambda done, *rest: said.append(done)  # noqa: E731
    points = list(capacity(problem, part, 1.0 / smallest_that_meets, [8, 2, 5], "linear", report=report))
    assert [point.parts for point in points] == [2, 5, 8, *between]
    best = smallest(points, 1.0 / smallest_that_meets)
    assert (best.parts if best else 9) == smallest_that_meets
    assert said == sorted(said) or between, "what is done falls only when more sizes are found to be missing"
    assert all(0 <= done < 1 for done in said)


def test_sizes_span_the_open_clusters() -> None:
    whole = cluster_presets()["hgx-h100-4-nodes"].cluster
    assert [8 * count for count in ladder(whole, whole.nodes[:1])] == [8, 16, 24, 32, 48, 64, 96]
    assert ladder(whole, whole.nodes) == [1, 2, 3] and most_gpus(whole) == 256
    large = grown(whole, whole.nodes, 10)
    assert max(ladder(large, whole.nodes[:1])) * 8 == most_gpus(large) == 960


def test_a_size_without_room_is_refused_and_the_search_goes_on() -> None:
    problem = problem_of()
    tight = problem_of(memory=3.4 * problem.model.bytes_per_expert * 2 / 0.9)
    part = next(iter(parts_of(tight.cluster).values()))
    points = list(capacity(tight, part, 1e-9, [1, 2, 3, 4], "linear"))
    assert "do not fit" in points[0].refused and points[0].total is None and points[0].cannot_meet(1.0)
    assert points[1].total is not None and len(points) == 4


def test_a_bound_says_what_is_certain() -> None:
    problem = problem_of()
    part = next(iter(parts_of(problem.cluster).values()))
    points = list(capacity(problem, part, 1e-9, [1, 2, 3], "aurora", {"time_limit": 1.0}))
    assert all(point.bound <= point.total and point.cannot_meet(0.99 * point.bound) for point in points)
    assert not any(point.cannot_meet(point.total) for point in points)
    order_only = CapacityPoint(1, 1, 2.0, 1.5, "order")
    assert not order_only.cannot_meet(1.0) and order_only.meets(2.0)
    assert CapacityPoint(**points[0].to_dict()) == points[0]


def test_parts_and_larger_clusters() -> None:
    cluster = problem_of(per_node=2).cluster
    parts = parts_of(cluster)
    assert list(parts) == ["2 × type-0 (one)", "2 × type-1 (two)", "the whole cluster in steps of 4 GPUs"]
    larger = grown(cluster, parts["the whole cluster in steps of 4 GPUs"], 3)
    assert len(larger.gpus) == 12 and larger.latency == cluster.latency
    crowded = cluster.model_copy(update={"efficiency": Efficiency(fabric=((1, 1.0), (4, 0.5)))})
    assert grown(crowded, crowded.nodes, 2).efficiency == crowded.efficiency and larger.efficiency is None
    assert larger.gpus[:4] == cluster.gpus and len({node.name for node in larger.nodes}) == 6
    doubled = parts_of(larger := grown(cluster, cluster.nodes, 2))
    assert doubled["the same mix in steps of 4 GPUs"] == (larger.nodes[0], larger.nodes[1])
    alike = replace_nodes(cluster, [cluster.nodes[0], cluster.nodes[0].model_copy(update={"name": "same"})])
    assert len(parts_of(alike)) == 1


def replace_nodes(cluster: Cluster, nodes) -> Cluster:
    return cluster.model_copy(update={"nodes": tuple(nodes)})


def test_what_cannot_be_sought() -> None:
    problem = problem_of()
    part = next(iter(parts_of(problem.cluster).values()))
    for target, sizes, said in (
        (0.0, [4], "not above 0"),
        (float("nan"), [4], "not above 0"),
        (1.0, [], "at least one number"),
        (1.0, [0, 1], "give between 1"),
        (1.0, [1, 9999], "give between 1"),
    ):
        with pytest.raises(InputError, match=said):
            list(capacity(problem, part, target, sizes, "linear"))
    matrix = TrafficMatrix("bytes", np.ones((2, 2, 6)), 128)
    with pytest.raises(InputError, match="says nothing about more of them"):
        list(capacity(replace(problem, workload=matrix), part, 1.0, [4], "linear"))
    with pytest.raises(InputError, match="training step"):
        fitted(step_problem(), problem.cluster)
    assert list(capacity(problem, part, 1.0, [4], "linear", stop=lambda: True)) == []
