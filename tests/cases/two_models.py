"""Problems and plans of two models on one cluster."""

import numpy as np
from hypothesis import strategies as st

from engine.costs import Datasheet
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate.work import Load
from engine.systems.pieces import phased_order
from engine.workload import RoutingTrace
from tests.cases.launch_plans import plan_with
from tests.strategies import cluster_of, clusters, cost_models, make_gpu, make_model, placements, traces


@st.composite
def pairs(draw, **options) -> Problem:
    """Two models of as many layers and experts on one cluster."""
    cluster = draw(clusters(**options))
    gpus = len(cluster.gpus)
    experts, layers = draw(st.integers(gpus, 2 * gpus)), draw(st.integers(1, 3))
    first, second = (draw(traces(layers, experts, gpus)) for _ in range(2))
    models = [make_model(layers, experts, trace.k) for trace in (first, second)]
    return make_problem(first, cluster, models[0], draw(cost_models(cluster)), second=(second, models[1]))


def plan_of(problem: Problem, placement, placement_b, mode: str) -> Plan:
    sides = (placement, problem), (placement_b, problem.second)
    first, second = (phased_order(Load(side, where, problem.travel), mode, lambda: False) for where, side in sides)
    return plan_with(placement, name="two", send_order=first, placement_b=placement_b, send_order_b=second)


@st.composite
def planned_pairs(draw):
    problem = draw(pairs())
    sizes = (problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus))
    chosen = (draw(placements(*sizes)) for _ in range(2))
    return plan_of(problem, *chosen, draw(st.sampled_from(("matched", "concurrent")))), problem


def pair_of_samples(gpus: int = 4, experts: int = 8) -> Problem:
    rng = np.random.default_rng(1)
    cards = [make_gpu(send=rate * 1e9, receive=rate * 1e9) for rate in (12.5, 10, 6.25, 5)] * (gpus // 4)
    popular = rng.dirichlet(np.full(experts, 0.5), size=4)
    chosen = np.array([rng.choice(experts, size=400, p=chances) for chances in popular], dtype=np.int16)
    first, second = (RoutingTrace(f"trace {i}", chosen[2 * i : 2 * i + 2].T.copy()[:, :, None], experts) for i in range(2))
    model = make_model(2, experts)
    return make_problem(first, cluster_of(*cards), model, Datasheet(), second=(second, model))
