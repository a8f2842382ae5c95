"""Small planning problems with computation, transfers and start-up times of about the same weight."""

import numpy as np

from engine.costs import Datasheet
from engine.problem import Problem, make_problem
from engine.workload import RoutingTrace
from tests.cases.training import problem_of
from tests.strategies import cluster_of, make_gpu, make_model


def small(mixed: bool = True, layers: int = 3) -> Problem:
    cards = [make_gpu(place % 2 if mixed else 0, send=1e6 / (1 + (place % 2 if mixed else 0))) for place in range(4)]
    rng = np.random.default_rng(3)
    trace = RoutingTrace("small", rng.zipf(1.6, (400, layers, 1)).clip(1, 8).astype(np.int16) - 1, 8)
    return make_problem(trace, cluster_of(*cards, latency=1e-4), make_model(layers, 8), Datasheet())


def step_problem() -> Problem:
    return problem_of(vocabulary=2000)
