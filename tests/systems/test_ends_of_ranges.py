"""Clusters and models that documents may describe but nobody has: every system plans in finite numbers, or says one line."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.cluster import Cluster, Gpu, Node
from engine.communication import relays
from engine.compare.comparison import candidate
from engine.costs import Datasheet
from engine.errors import InputError
from engine.goal import Goal
from engine.model import MoEModel
from engine.problem import Problem, make_problem
from engine.schema import json_text
from engine.systems import SYSTEMS, TRAINING, run
from engine.training import TrainingStep
from engine.validate import refuse_broken
from engine.workload import RoutingTrace
from tests.cases.fuzzing import EXAMPLES, LONGEST_LINE
from tests.cases.samples import mixed_problem

RATES = st.sampled_from((1e-3, 1.0, 5e10, 1e15, 1e30))
MEMORY = st.sampled_from((1e6, 8e10, 1e21))
START_UP = st.sampled_from((0.0, 5e-324, 1e-6, 3600.0))
GOALS = {goal: [system for system in (*SYSTEMS.values(), *TRAINING.values()) if goal in system.goals] for goal in Goal}


@st.composite
def gpus(draw: st.DrawFn, kind: int) -> Gpu:
    names = ("memory_bandwidth", "flops_fp32", "flops_fp16", "send_bandwidth", "receive_bandwidth")
    return Gpu(type=f"type-{kind}", memory=draw(MEMORY), **{name: draw(RATES) for name in names})


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Two nodes of two GPUs, with or without links."""
    kinds = [draw(gpus(kind)) for kind in range(draw(st.integers(1, 4)))]
    cards = [kinds[place % len(kinds)] for place in range(4)]
    links = [{"link_bandwidth": draw(st.none() | RATES), "link_latency": draw(START_UP)} for _ in range(2)]
    nodes = [Node(name=f"node-{at}", gpus=tuple(cards[2 * at :][:2]), **link) for at, link in enumerate(links)]
    return Cluster(name="odd", nodes=nodes, latency=draw(START_UP))


@st.composite
def problems(draw: st.DrawFn, goal: Goal) -> Problem:
    def model() -> MoEModel:
        sizes: dict[str, Any] = {name: draw(st.sampled_from((1, 64, 1_000_000))) for name in ("d_model", "d_ff")}
        sizes["shared_experts"] = draw(st.sampled_from((0, 64)))
        return MoEModel(name="odd", layers=2, experts=8, experts_per_token=2, batch=1, **sizes)

    def trace(seed: int) -> RoutingTrace:
        return RoutingTrace("odd", np.random.default_rng(seed).integers(0, 8, (12, 2, 2)).astype(np.int16), 8)

    more: dict[str, Any] = {"second": (trace(1), model())} if goal is Goal.TWO_MODELS else {}
    if goal is Goal.TRAINING:
        more["step"] = TrainingStep(batch=1, sequence_length=draw(st.sampled_from((1, 4096))), heads=1, dense_d_ff=64)
    return make_problem(trace(0), draw(clusters()), model(), Datasheet(), **more)


@pytest.mark.parametrize("goal", Goal)
@given(data=st.data())
@settings(max_examples=EXAMPLES // 6, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_system_plans_in_finite_numbers_or_says_one_line(goal, data):
    try:
        problem = data.draw(problems(goal))
        system = data.draw(st.sampled_from(GOALS[goal]))
        known = {"time_limit": 0.05} if "time_limit" in system.options.model_fields else {}
        outcome = run(system, problem, known)
        refuse_broken(outcome.result.solution, problem)
        row = candidate(outcome, problem)
        json_text(row.model_dump(mode="json"))
        assert all(map(math.isfinite, (outcome.result.objective, outcome.result.bound, outcome.timeline.total)))
    except InputError as error:
        line = str(error)
        assert line.isprintable() and len(line) < LONGEST_LINE


@pytest.mark.parametrize("name", ["exflow", "joint"])
def test_hops_that_fit_no_memory_are_one_line(name):
    problem = at_the_limits(layers=10, cards=2)
    assert (problem.expert_slots_of_gpu() >= 4096).all()  # memory for more experts than integers count
    with pytest.raises(InputError, match=r"take more memory than there may be .* take fewer layers"):
        run(SYSTEMS[name], problem, {})
    with pytest.raises(InputError, match="1,000 layers of 4,096 experts on 64 GPUs make 262,144,000 places"):
        at_the_limits(layers=1000, cards=64)


def test_an_order_that_fits_no_memory_is_passed_over(monkeypatch):
    monkeypatch.setattr(relays, "MOST_CELLS", 0)
    problem = mixed_problem()
    outcome = run(SYSTEMS["aurora"], problem, {"time_limit": 0.2})
    refuse_broken(outcome.result.solution, problem)
    said = outcome.notes["two-tier order"].value
    assert "proven" in said or said.startswith("not possible: an order in two tiers")
    with pytest.raises(InputError, match="an order in two tiers"):
        run(SYSTEMS["aurora"], problem, {"time_limit": 0.2, "order": "two-tier"})


def at_the_limits(layers: int, cards: int) -> Problem:
    """Most experts, and one token."""
    rates = dict.fromkeys(("memory_bandwidth", "flops_fp32", "flops_fp16", "send_bandwidth", "receive_bandwidth"), 1e9)
    card = Gpu(type="odd", memory=1e21, **rates)
    model = MoEModel(name="most", layers=layers, experts=4096, experts_per_token=1, d_model=1, d_ff=1)
    trace = RoutingTrace("few", np.zeros((1, layers, 1), dtype=np.int16), 4096)
    return make_problem(trace, Cluster(name="odd", nodes=(Node(name="a", gpus=(card,) * cards),)), model, Datasheet())
