"""What all GPUs wait for: nothing of the time is lost, and a slow port or processor is named."""

import numpy as np
import pytest

from engine.costs import Datasheet
from engine.plan import Plan, SendOrder
from engine.problem import Problem
from engine.result import Provenance
from engine.simulate import simulate
from engine.simulate.events import waits
from engine.systems import SYSTEMS, run
from engine.systems.pieces import linear_placement
from engine.timeline import NETWORK_KINDS
from engine.workload import RoutingTrace
from tests.strategies import cluster_of, make_gpu, make_model

GPUS, LAYERS, EXPERTS = 4, 3, 8


def problem_with(*cards) -> Problem:
    experts = np.random.default_rng(1).integers(0, EXPERTS, (400, LAYERS, 1)).astype(np.int16)
    return Problem(RoutingTrace("even", experts, EXPERTS), cluster_of(*cards), make_model(LAYERS, EXPERTS), Datasheet())


def concurrent(problem: Problem) -> Plan:
    order = SendOrder(mode="concurrent")
    return Plan(name="test", placement=linear_placement(problem), send_order=order, provenance=Provenance(optimiser=""))


@pytest.mark.parametrize("system", ["aurora", "rcs", "linear"])
def test_the_waits_add_up_to_the_time_step_by_step(system) -> None:
    problem = problem_with(*(make_gpu(kind, 1e6 / (kind + 1)) for kind in range(GPUS)))
    timeline = simulate(run(SYSTEMS[system], problem, {}).result.solution, problem)
    waiting = waits(timeline, problem.network)
    assert waiting["seconds"].sum() == pytest.approx(timeline.total) and (waiting["seconds"] >= 0).all()
    events = timeline.events
    assert len(waiting) == len({(itertuple.layer, itertuple.kind) for itertuple in events.itertuples()})
    for step in waiting.itertuples():
        mine = events[(events["layer"] == step.layer) & (events["kind"] == step.kind)]
        last = mine[mine["end"] == mine["end"].max()]
        assert step.gpu in {*last["resource"], *last["peer"]} - {-1}


@pytest.mark.parametrize("way", ["send", "receive"])
def test_the_gpu_with_the_slow_port_is_waited_for(way) -> None:
    slow = {"send": 1e6, "receive": 1e6} | {way: 1e5}
    cards = [make_gpu(0, 1e6) for _ in range(GPUS)]
    cards[2] = make_gpu(1, **slow)
    waiting = waits(simulate(concurrent(problem := problem_with(*cards)), problem), problem.network)
    networked = waiting[waiting["kind"].isin(NETWORK_KINDS)]
    assert len(networked) == 2 * LAYERS and set(networked["gpu"]) == {2}


def test_the_slow_half_is_waited_for_however_long_the_fast_half_sends_to_it() -> None:
    """A fast port that sends to several slow ones at once is at work as long as they are, but not what limits them."""
    cards = [make_gpu(0, 1e6), make_gpu(0, 1e6), make_gpu(1, 1e5), make_gpu(1, 1e5)]
    waiting = waits(simulate(concurrent(problem := problem_with(*cards)), problem), problem.network)
    networked = waiting[waiting["kind"].isin(NETWORK_KINDS)]
    assert len(networked) == 2 * LAYERS and set(networked["gpu"]) <= {2, 3}


def test_the_gpu_that_computes_slowly_is_waited_for() -> None:
    cards = [make_gpu(0, flops=2e9) for _ in range(GPUS)]
    cards[1] = make_gpu(1, flops=2e8)
    waiting = waits(simulate(concurrent(problem := problem_with(*cards)), problem), problem.network)
    assert set(waiting.loc[waiting["kind"] == "ffn", "gpu"]) == {1}
    assert waiting.groupby("gpu")["seconds"].sum().idxmax() == 1
