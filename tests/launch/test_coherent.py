"""Context-coherent execution: the same outputs on every rank, and the traffic that was simulated."""

from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.costs import Datasheet
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.coherent import CarriedLayers
from engine.launch.rank.instructions import RankInstructions, Tokens
from engine.launch.running.local import run_here
from engine.network import off_diagonal
from engine.plan import Placement
from engine.problem import Problem
from engine.result import never
from engine.runtime.exchange.links import Tiers
from engine.simulate.work import work_of
from engine.systems.base import silent
from engine.workload import RoutingTrace
from tests.cases import layers
from tests.cases.examples import examples
from tests.cases.launch_plans import MODES, coherent, plan_with
from tests.cases.launches import EXPERTS, HOST, LAYERS, MODEL, K, plan_for, recording, sent
from tests.cases.layers import unplanned
from tests.cases.two_nodes import cluster_of
from tests.launch import lockstep

pytestmark = pytest.mark.usefixtures("warm_python")


@st.composite
def launches(draw) -> tuple[RankInstructions, Tokens]:
    """Every expert on one rank, and tokens of which some lack their first choice, some any, some in all layers."""
    instructions, tokens = draw(layers.launches())
    ranks, count = instructions.ranks, instructions.model.layers
    home = draw(hnp.arrays(np.int64, (count, 5), elements=st.integers(0, ranks - 1)))
    placement = Placement.from_gpu_of_expert(home, ranks, tuple(range(count)))
    nodes = tuple(sorted(draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))))
    linked = tuple(8.0 if nodes.count(node) > 1 else 0.0 for node in nodes)
    drawn = draw(st.none() | st.just(Tiers(node=nodes, port=(1.0,) * ranks, link=linked)))
    plans = (plan_with(placement, execution="context-coherent"),)
    return instructions.model_copy(update={"plans": plans, "tiers": drawn}), tokens


def all_gathered(ranks: list[CarriedLayers], layer: int, wanted: np.ndarray) -> None:
    """The all-gather of tokens before a layer, piece by piece; the pieces of a phase go at once. wanted: bytes between ranks"""
    for rank in ranks:
        rank.ready_to_gather(layer)
        rank._everything.fill_(torch.nan)
        rank._everything[rank._own_rows] = rank.x[rank._mine]
        assert rank._gathering.order == ranks[0]._gathering.order
    moved = np.zeros_like(wanted)
    for _, phase in groupby(ranks[0]._gathering.order, key=lambda piece: piece.phase):
        sent = [(piece, ranks[piece.src]._everything[piece.begin : piece.end].clone()) for piece in phase]
        for piece, rows in sent:
            ranks[piece.dst]._everything[piece.begin : piece.end] = rows
            moved[piece.src, piece.dst] += len(rows) * ranks[0].model.bytes_per_token
    np.testing.assert_array_equal(moved, off_diagonal(wanted))


@settings(max_examples=examples(120), deadline=None)
@given(launches())
def test_all_ranks_have_all_prompts_and_the_outputs_of_one_process_by_the_rows_that_are_simulated(launch):
    instructions, tokens = launch
    (plan,), model, ranks = instructions.plans, instructions.model, lockstep.ranks_of(*launch, CarriedLayers)
    node = range(instructions.ranks) if instructions.tiers is None else instructions.tiers.node
    _, sizes = np.unique(node, return_counts=True)
    cluster = cluster_of(*((size, 8e9 if size > 1 else None) for size in sizes.tolist()))
    trace = RoutingTrace("trace", tokens.experts, model.experts, None, tokens.source)
    work = work_of(plan.placement, Problem(trace, cluster, model, Datasheet()), plan.execution)
    for kind in ("dispatch", "combine"):
        for way, wanted in zip(ranks[0].routes[kind], getattr(work, kind), strict=True):
            np.testing.assert_array_equal(way.counts * model.bytes_per_token, wanted)
            assert kind == "dispatch" or tokens.experts.shape[2] > 1 or not off_diagonal(way.counts).any()
    with torch.inference_mode():
        for rank in ranks:
            rank.begin()
        all_gathered(ranks, 0, work.prompt_gather)
        for rank in ranks:
            torch.testing.assert_close(rank.gathered(), rank.first_tokens(), rtol=0, atol=0)
    lockstep.run(ranks)
    with torch.inference_mode():
        all_gathered(ranks, model.layers, work.gather)
        for rank in ranks:
            torch.testing.assert_close(rank.gathered(), unplanned(instructions, tokens), rtol=1e-5, atol=1e-5)


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
        assert 0 <= run.difference.error <= 1e-5
    vanilla, *carried = whole.runs
    assert "all_gather" not in set(vanilla.measured.events["kind"])
    column = MODEL.d_model / (MODEL.d_model + K)  # its weights travel with a token
    routed = (experts >= 0).any(axis=(1, 2)).sum()
    for run in carried:
        for layer in range(LAYERS):
            for kind, part in (("dispatch", column), ("combine", 1.0), ("all_gather", 1.0), ("prompt_gather", 1.0)):
                measured, predicted = (sent(timeline, kind, layer, 3) for timeline in (run.measured, run.predicted))
                np.testing.assert_allclose(measured * part, predicted, rtol=1e-9)
        for kind, layer in (("prompt_gather", 0), ("all_gather", LAYERS - 1)):
            gathered = sent(run.measured, kind, layer, 3)
            assert gathered.sum() == 2 * routed * launch.instructions.model.bytes_per_token
        ends = run.measured.events.groupby("kind", observed=True)["end"].max()
        assert ends["all_gather"] == run.measured.total
        assert ends["prompt_gather"] <= run.measured.events.query("kind == 'gate'")["start"].min()
    # Tokens that stay with their experts send less than tokens that return after every layer.
    less = sum(sent(carried[0].measured, "combine", layer, 3).sum() for layer in range(LAYERS))
    assert less < 0.8 * sum(sent(vanilla.measured, "combine", layer, 3).sum() for layer in range(LAYERS))
