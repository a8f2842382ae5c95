"""Small planning problems with computation, transfers and start-up times of about the same weight."""

import numpy as np

from engine.costs import Datasheet
from engine.problem import Problem, make_problem
from engine.training import TrainingStep, balanced_load
from engine.workload import RoutingTrace
from tests.strategies import cluster_of, make_gpu, make_model


def small(mixed: bool = True, layers: int = 3) -> Problem:
    cards = [make_gpu(place % 2 if mixed else 0, send=1e6 / (1 + (place % 2 if mixed else 0))) for place in range(4)]
    rng = np.random.default_rng(3)
    trace = RoutingTrace("small", rng.zipf(1.6, (400, layers, 1)).clip(1, 8).astype(np.int16) - 1, 8)
    return make_problem(trace, cluster_of(*cards, latency=1e-4), make_model(layers, 8), Datasheet())


def step_problem() -> Problem:
    model = make_model(2, 4)
    step = TrainingStep(batch=8, sequence_length=16, heads=4, dense_d_ff=96, vocabulary=2000)
    cluster = cluster_of(*(make_gpu() for _ in range(4)), latency=1e-4)
    return make_problem(balanced_load(model), cluster, model, Datasheet(), step=step)
