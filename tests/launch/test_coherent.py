"""Context-coherent execution: the same outputs on every rank, and the traffic that was simulated."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.cluster import Cluster, Gpu, Node
from engine.costs import Datasheet
from engine.launch.places.devices import Devices
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.coherent import CarriedLayers
from engine.launch.rank.instructions import RankInstructions, Tokens
from engine.launch.running.local import run_here
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem
from engine.result import Provenance, never
from engine.simulate.work import work_of
from engine.systems.base import silent
from engine.timeline import Timeline
from engine.workload import RoutingTrace
from tests.launch import lockstep
from tests.launch.test_layer import model_of, unplanned
from tests.launch.test_local import EXPERTS, LAYERS, MODEL, MODES, K, plan_for, recording

pytestmark = [pytest.mark.usefixtures("warm_python"), pytest.mark.slow]

HOST = Devices(gpus=(), memory=(), cores=2, host_memory=8 * 2.0**30)


@st.composite
def launches(draw) -> tuple[RankInstructions, Tokens]:
    """Every expert on one rank, and tokens of which some lack their first choice, some any, some in all layers."""
    ranks, k, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    model = model_of(layers=layers, experts_per_token=k)
    tokens = draw(st.integers(1, 12))
    chosen = draw(hnp.arrays(np.int16, (tokens, layers, k), elements=st.integers(-1, 4)))
    source = draw(hnp.arrays(np.int32, tokens, elements=st.integers(0, ranks - 1)))
    home = draw(hnp.arrays(np.int64, (layers, 5), elements=st.integers(0, ranks - 1)))
    plan = Plan(
        name="plan",
        placement=Placement.from_gpu_of_expert(home, ranks, tuple(range(layers))),
        send_order=SendOrder(mode="concurrent"),
        execution="context-coherent",
        provenance=Provenance(optimiser="test"),
    )
    return RankInstructions(plans=(plan,), model=model, ranks=ranks, backend="gloo"), Tokens(chosen, source)


@settings(max_examples=80, deadline=None)
@given(launches())
def test_every_rank_ends_with_the_outputs_of_one_process(launch):
    instructions, tokens = launch
    wanted, ranks = unplanned(instructions, tokens), lockstep.ranks_of(*launch, CarriedLayers)
    lockstep.run(ranks)
    with torch.inference_mode():
        for rank in ranks:
            rank.ready_to_gather()
        parts = [rank.x[rank._mine] for rank in ranks]
        for rank in ranks:
            assert [len(part) for part in parts] == rank._left.tolist()
            rank._everything.copy_(torch.cat(parts))
            torch.testing.assert_close(rank.gathered(), wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(launches())
def test_what_is_sent_is_what_is_simulated(launch):
    instructions, tokens = launch
    (plan,), model, ranks = instructions.plans, instructions.model, lockstep.ranks_of(*launch, CarriedLayers)
    gpu = Gpu(
        type="any",
        memory=1e12,
        memory_bandwidth=1e12,
        flops_fp32=1e12,
        flops_fp16=1e12,
        send_bandwidth=1e9,
        receive_bandwidth=1e9,
    )
    cluster = Cluster(name="any", nodes=(Node(name="node", gpus=(gpu,) * instructions.ranks),))
    trace = RoutingTrace("trace", tokens.experts, model.experts, None, tokens.source)
    work = work_of(plan.placement, Problem(trace, cluster, model, Datasheet()), plan.execution)
    size = model.bytes_per_token
    for layer in range(model.layers):
        np.testing.assert_array_equal(ranks[0].routes["dispatch"][layer].counts * size, work.dispatch[layer])
        np.testing.assert_array_equal(ranks[0].routes["combine"][layer].counts * size, work.combine[layer])
    lockstep.run(ranks)
    for rank in ranks:
        rank.ready_to_gather()
        np.testing.assert_array_equal(rank._left * size, work.gather[:, 0])
    if tokens.experts.shape[2] == 1:
        off_diagonal = ~np.eye(instructions.ranks, dtype=bool)
        assert not any(way.counts[off_diagonal].any() for way in ranks[0].routes["combine"])


# Real ranks.


def coherent(plan: Plan) -> Plan:
    return plan.model_copy(update={"execution": "context-coherent", "name": f"coherent {plan.name}"})


def sent(timeline: Timeline, kind: str, layer: int, ranks: int) -> np.ndarray:
    """float64[src, dst] bytes."""
    events = timeline.events[(timeline.events["kind"] == kind) & (timeline.events["layer"] == layer)]
    traffic = np.zeros((ranks, ranks))
    np.add.at(traffic, (events["resource"], events["peer"]), events["bytes"])
    return traffic


def test_coherent_plans_of_every_order_beside_a_vanilla_one_on_fewer_ranks(tmp_path):
    trace = recording(240, padding=0.2)
    experts = trace.experts.copy()
    experts[::7, :, 0] = -1  # no first choice, but a second one
    experts[::11] = -1  # nothing in any layer
    trace = RoutingTrace("gaps", experts, EXPERTS)
    plans = [plan_for(trace, "matched"), *(coherent(plan_for(trace, mode)) for mode in MODES)]
    launch = prepare(Launch(tuple(plans), trace, MODEL, ranks=3, repeats=1, limit=120.0), HOST)
    whole = run_here(launch, tmp_path / "run", never, silent)
    for run in whole.runs:
        assert 0 <= run.difference <= 1e-5
    vanilla, *carried = whole.runs
    assert "all_gather" not in set(vanilla.measured.events["kind"])
    column = MODEL.d_model / (MODEL.d_model + K)  # its weights travel with a token
    routed = (experts >= 0).any(axis=(1, 2)).sum()
    for run in carried:
        for layer in range(LAYERS):
            for kind, part in (("dispatch", column), ("combine", 1.0), ("all_gather", 1.0)):
                measured, predicted = (sent(timeline, kind, layer, 3) for timeline in (run.measured, run.predicted))
                np.testing.assert_allclose(measured * part, predicted, rtol=1e-9)
        gathered = sent(run.measured, "all_gather", LAYERS - 1, 3)
        assert gathered.sum() == 2 * routed * launch.instructions.model.bytes_per_token
        ends = run.measured.events.groupby("kind", observed=True)["end"].max()
        assert ends["all_gather"] == run.measured.total
    # Tokens that stay with their experts send less than tokens that return after every layer.
    less = sum(sent(carried[0].measured, "combine", layer, 3).sum() for layer in range(LAYERS))
    assert less < 0.8 * sum(sent(vanilla.measured, "combine", layer, 3).sum() for layer in range(LAYERS))
