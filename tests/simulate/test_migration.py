"""Moving costs of whole plans, on the cluster's own network."""

import numpy as np
import pytest

from engine.compare.figures import migration
from engine.costs import Datasheet
from engine.plan import Placement
from engine.problem import Problem
from engine.workload import ExpertLoad
from tests.strategies import cluster_of, make_gpu, make_model


@pytest.fixture
def problem() -> Problem:
    cards = [make_gpu(send=1e9, receive=1e9)] * 2
    return Problem(ExpertLoad("loads", np.ones((2, 4)), (0, 1)), cluster_of(*cards), make_model(2, 4), Datasheet())


def placed(*rows) -> Placement:
    return Placement.from_gpu_of_expert(np.array(rows), 2, (0, 1))


def test_staying_is_free(problem):
    same = placed([0, 0, 1, 1], [0, 0, 1, 1])
    cost = migration(same, same, problem, 1.0, 1.0)
    assert (cost.copies, cost.bytes, cost.seconds, cost.steps) == (0, 0, 0, 0)


def test_a_swap_moves_one_expert_each_way_and_pays_back(problem):
    cost = migration(placed([0, 0, 1, 1], [0, 0, 1, 1]), placed([0, 1, 0, 1], [0, 0, 1, 1]), problem, 1.0, 0.75)
    size = problem.model.bytes_per_expert
    assert cost.copies == 2 and cost.bytes == 2 * size
    assert cost.seconds == pytest.approx(size / 1e9 + problem.cluster.latency)  # both directions at once
    assert cost.bound <= cost.seconds
    assert cost.steps == pytest.approx(cost.seconds / 0.25)


def test_a_slower_plan_never_pays(problem):
    cost = migration(placed([0, 0, 1, 1], [0, 0, 1, 1]), placed([1, 1, 0, 0], [0, 0, 1, 1]), problem, 1.0, 1.5)
    assert cost.steps == float("inf")
