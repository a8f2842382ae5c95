"""Launches of workloads without tokens: a traffic matrix moves its bytes, and drawn tokens have the loads."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.communication.travel import Stops, rows_of_tokens, touched_by_chance
from engine.jobs.launches import describe_run
from engine.launch.preparation import inference, replayed
from engine.launch.preparation.launch import ROUTING, Launch, PreparedLaunch
from engine.launch.preparation.replayed import supply_of
from engine.launch.running import clusters
from engine.launch.running.local import run_here
from engine.model import MoEModel
from engine.network import off_diagonal
from engine.plan import Placement, Plan, Travel
from engine.problem import model_for
from engine.result import never
from engine.systems.base import silent
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix
from tests.cases import launches, steps
from tests.cases.cluster_launches import destination
from tests.cases.examples import examples
from tests.cases.launch_plans import coherent, plan_in
from tests.cases.launches import EXPERTS, HOST, LAYERS, MODEL, OTHER, K, of, sent
from tests.cases.refusals import refusal

GPUS = 4
OF_GPUS = MODEL.model_copy(update={"name": "columns", "dense_layers": (1,), "layers": 4, "experts": 16})
"""A model that has other layers and experts than the matrix, which knows neither."""
MATRIX = TrafficMatrix("bytes", np.random.default_rng(3).integers(0, 12_000, (LAYERS, GPUS, GPUS)).astype(float), 1.0)
MATRIX.bytes[0, 1] = 0.0
MATRIX.bytes[1, :, 2] = 0.0
LOADS = ExpertLoad("loads", launches.recording(301).load, tuple(range(LAYERS)))


def of_matrix(gpus: int = GPUS) -> Placement:
    """Column after column, each on another GPU, the last ones first."""
    slots = tuple((gpu,) for gpu in reversed(range(gpus)))
    return Placement(experts=gpus, experts_of_gpu=(slots,) * LAYERS, model_layers=tuple(range(LAYERS)))


def plan_of(workload: TrafficMatrix | ExpertLoad, mode: str, where: Placement) -> Plan:
    """A plan made on the workload itself."""
    model = model_for(workload, MODEL).model_copy(update={"dtype": "fp32"})
    known = replace(workload, bytes_per_token=model.bytes_per_token) if isinstance(workload, TrafficMatrix) else workload
    return plan_in(mode, known, where, model)


def prepared(workload, *plans: Plan, ranks: int = 2, model: MoEModel = MODEL, **more) -> PreparedLaunch:
    return inference.prepare_inference(Launch(plans, workload, model, ranks=ranks, **{"repeats": 1} | more), HOST)


def said_of_routing(launch: PreparedLaunch) -> str:
    (line,) = [check.text for check in launch.checks if check.name == ROUTING]
    return line


# A traffic matrix.
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 3), st.integers(1, 8), st.floats(1, 5e3), st.data())
def test_rows_are_the_bytes_of_a_matrix_to_a_row(seed, gpus, layers, k, scale, data):
    rng = np.random.default_rng(seed)
    matrix = TrafficMatrix("any", rng.exponential(scale, (layers, gpus, gpus)) * (rng.random((layers, gpus, gpus)) < 0.8), 1.0)
    ranks = data.draw(st.integers(1, gpus))
    model = model_for(matrix, MODEL.model_copy(update={"experts_per_token": k, "d_model": 8, "dtype": "fp32", "experts": 64}))
    wanted = np.zeros((layers, ranks, gpus))
    np.add.at(wanted, (slice(None), np.arange(gpus) * ranks // gpus), matrix.bytes)
    wanted /= model.bytes_per_token
    if wanted.sum(axis=2).max() < 0.5:
        assert not matrix.bytes.any() or "less than a row of 32 bytes" in refusal(supply_of(matrix, model, gpus, ranks).part, 1)
        return
    trace = supply_of(matrix, model, gpus, ranks).part(1.0)
    rows = trace.demand(ranks)
    assert (np.abs(rows - wanted) < 1).all() and (rows[wanted == 0] == 0).all()
    assert (np.abs(rows.sum(axis=2) - wanted.sum(axis=2)) <= 0.5 + 1e-6).all()
    # As many tokens as the simulation counts, copies / k, in the layer that needs most.
    held = np.bincount(trace.source_rank, minlength=ranks)
    assert (held == np.ceil(rows.sum(axis=2) / trace.k).max(axis=0)).all() and trace.k == min(k, gpus)


@pytest.fixture(scope="module", params=[2, GPUS])
def launched_matrix(request, launch_once):
    plans = [plan_of(MATRIX, mode, of_matrix()) for mode in ("matched", "shared", "sequential", "concurrent")]
    launch = prepared(MATRIX, *plans, ranks=request.param, model=OF_GPUS)
    return launch, launch_once(launch)


def test_a_matrix_moves_its_bytes_in_every_order_to_a_row_on_the_wire(launched_matrix):
    launch, whole = launched_matrix
    ranks, row = launch.instructions.ranks, launch.instructions.model.bytes_per_token
    assert row == 4 * MODEL.d_model and launch.instructions.model.experts == GPUS
    assert whole.tokens == launch.tokens and len(whole.runs) == 4
    rank = np.arange(GPUS) * ranks // GPUS
    expert_rank = rank[::-1]
    wanted = np.zeros((LAYERS, ranks, ranks))
    np.add.at(wanted, (slice(None), rank[:, None], expert_rank[None, :]), MATRIX.bytes)
    for run in whole.runs:
        assert 0 <= run.difference.error <= 1e-5
        for layer in range(LAYERS):
            for timeline in (run.measured, run.predicted):
                dispatch, combine = (sent(timeline, kind, layer, ranks) for kind in ("dispatch", "combine"))
                off = dispatch - off_diagonal(wanted[layer])
                # Neighbouring columns on a rank are within a row together, for rows are rounded along them.
                assert 0 < np.abs(off).max() < row + 1e-6
                np.testing.assert_allclose(combine, dispatch.T)


def test_the_experts_work_on_a_matrix_is_that_of_the_simulation(launched_matrix):
    launch, _ = launched_matrix
    ranks, row = launch.instructions.ranks, launch.instructions.model.bytes_per_token
    (replayed,) = launch.workloads
    wanted = np.zeros((LAYERS, ranks, GPUS))
    np.add.at(wanted, (slice(None), np.arange(GPUS) * ranks // GPUS), MATRIX.bytes / row)
    demand = replayed.demand(ranks)
    assert (np.abs(demand - wanted) < 1).all() and (demand[wanted == 0] == 0).all()
    assert (np.abs(demand.sum(axis=2) - wanted.sum(axis=2)) <= 0.5 + 1e-6).all()
    np.testing.assert_array_equal(replayed.load, demand.sum(axis=1))


def test_a_part_of_a_matrix_has_that_part_of_its_bytes_and_no_launch_more_than_all():
    plan = plan_of(MATRIX, "concurrent", of_matrix())
    whole = prepared(MATRIX, plan)
    assert f"made of the bytes of bytes: {replayed.size(whole.workloads[0].load.sum() * 128)} with" in said_of_routing(whole)
    assert prepared(MATRIX, plan, tokens=10**9).workloads[0].digest == whole.workloads[0].digest
    half = prepared(MATRIX, plan, tokens=whole.tokens // 2)
    assert "bytes, times 0.50" in said_of_routing(half) and abs(half.tokens - whole.tokens / 2) <= 2
    np.testing.assert_allclose(half.workloads[0].demand(2), whole.workloads[0].demand(2) / 2, atol=1.5)
    # In half as wide numbers twice as many rows have the same bytes.
    short = prepared(MATRIX, plan, dtype="bf16")
    assert short.instructions.model.bytes_per_token == 64
    np.testing.assert_allclose(short.workloads[0].demand(2) * 64, whole.workloads[0].demand(2) * 128, atol=128)


# Expert loads.
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 24), st.integers(1, 4), st.integers(1, 200), st.data())
def test_drawn_tokens_have_the_loads_in_every_layer_and_no_expert_twice(seed, experts, layers, tokens, data):
    rng, k = np.random.default_rng(seed), data.draw(st.integers(1, min(experts, 6)))
    popular = rng.dirichlet(np.full(experts, 0.5), layers)
    chosen = np.argsort(rng.random((tokens, layers, experts)) ** (1 / (popular + 1e-9)), axis=2)[:, :, -k:].astype(np.int16)
    loads = ExpertLoad("any", RoutingTrace("r", chosen, experts).load, tuple(range(layers)))
    model = MoEModel(name="any", layers=layers, experts=experts, experts_per_token=k, d_model=8, d_ff=8)
    supply = supply_of(loads, model, 4, 2)
    trace = supply.part(supply.part_of(supply.usual))
    if tokens >= 2:
        assert trace.tokens == supply.usual == tokens
        np.testing.assert_array_equal(trace.load, loads.load)
    asked = data.draw(st.integers(1, 400))
    scaled = supply.part(supply.part_of(asked))
    assert scaled.tokens == asked and (scaled.experts >= 0).all()
    assert (np.abs(scaled.load - loads.load * asked / tokens) < 1).all()
    for drawn in (trace, scaled):
        ordered = np.sort(drawn.experts, axis=2)
        assert (np.diff(ordered, axis=2) > 0).all()


def test_an_expert_that_every_token_has_is_rounded_to_all_of_them_behind_a_half():
    loads = ExpertLoad("half", np.array([[0.5, 3.0, 2.5]]), (0,))
    trace = supply_of(loads, MODEL.model_copy(update={"experts": 3, "layers": 1}), 2, 2).part(1.0)
    assert trace.tokens == 3 and trace.load[0, 1] == 3


def test_every_draw_of_the_same_loads_is_the_same_and_layers_know_nothing_of_each_other():
    loads = replace(LOADS, load=np.repeat(LOADS.load[:1], 2, axis=0), model_layers=(0, 1))
    first, second = (supply_of(loads, MODEL, 4, 2).part(1.0) for _ in range(2))
    replayed._routed.cache_clear()
    np.testing.assert_array_equal(first.experts, supply_of(loads, MODEL, 4, 2).part(1.0).experts)
    assert first.digest == second.digest and not np.array_equal(first.experts[:, 0], first.experts[:, 1])


@pytest.mark.parametrize(("experts", "k", "gpus"), [(16, 2, 4), (64, 6, 8), (128, 8, 8)])
def test_drawn_tokens_share_rows_as_the_simulation_expects_of_loads(experts, k, gpus):
    share = np.random.default_rng(experts).dirichlet(np.full(experts, 2.0))
    load = np.minimum(share * 8192 * k, 6000)[None]
    model = MoEModel(name="any", layers=1, experts=experts, experts_per_token=k, d_model=8, d_ff=8)
    trace = supply_of(ExpertLoad("any", load, (0,)), model, gpus, gpus).part(1.0)
    placed = np.arange(experts) * gpus // experts
    rows = rows_of_tokens(placed[trace.experts[:, 0]], trace.source_rank, Stops(np.arange(gpus)), "gpu").sum(axis=0)
    likely = touched_by_chance(load[0], k, np.eye(gpus)[placed])
    np.testing.assert_allclose(rows, trace.tokens * likely, rtol=0.03)


def test_loads_by_source_are_drawn_rank_by_rank():
    by_source = np.random.default_rng(5).integers(0, 60, (GPUS, LAYERS, EXPERTS)).astype(float)
    loads = ExpertLoad("by source", by_source.sum(axis=0), tuple(range(LAYERS)), by_source)
    trace = supply_of(loads, MODEL, GPUS, 2).part(1.0)
    np.testing.assert_array_equal(trace.demand(2), by_source.reshape(2, 2, LAYERS, EXPERTS).sum(axis=1).transpose(1, 0, 2))
    part = supply_of(loads, MODEL, GPUS, 2).part(0.31)
    assert (np.abs(part.load - 0.31 * loads.load) <= 0.5 + 1e-6).all()
    text = said_of_routing(prepared(loads, launches.plan_for(launches.recording(), "concurrent")))
    assert f"have fewer than {K} in some layer, as the loads add up" in text


def test_an_expert_with_more_copies_than_its_share_allows_has_them_all_the_same():
    load = np.full((LAYERS, EXPERTS), 5.0)
    load[1, 3] = 200.0
    trace = supply_of(ExpertLoad("one", load, tuple(range(LAYERS))), MODEL, 4, 2).part(1.0)
    np.testing.assert_array_equal(trace.load, load)
    assert trace.tokens == 200 and (np.sum(trace.experts[:, 1] == 3, axis=1) == 1).all()


def test_shares_without_a_number_of_tokens_are_scaled_to_those_asked_for_and_many_are_cut(monkeypatch):
    shares, plan = (
        replace(LOADS, load=LOADS.load / LOADS.load.sum(axis=1, keepdims=True)),
        launches.plan_for(launches.recording(), "concurrent"),
    )
    assert prepared(shares, plan, ranks=4).tokens == 4 and prepared(shares, plan, tokens=500).tokens == 500
    monkeypatch.setattr(replayed, "USUAL_DRAWN", 50)
    assert prepared(LOADS, plan).tokens == 50 and prepared(LOADS, plan, tokens=700).tokens == 700
    monkeypatch.setattr(replayed, "MOST_DRAWN", 60)
    assert prepared(LOADS, plan, tokens=700).tokens == 60


@pytest.fixture(scope="module", params=[2, GPUS])
def launched_loads(request, launch_once):
    rows = Travel(unit="gpu", dispatch="fp8", combine="bf16")
    plans = [launches.plan_for(launches.recording(), mode, launches.UNEVEN) for mode in ("matched", "concurrent")]
    plans.append(plans[1].model_copy(update={"name": "rows", "travel": rows}))
    launch = prepared(LOADS, *plans, ranks=request.param)
    return launch, launch_once(launch)


def test_loads_are_launched_as_drawn_and_the_output_is_the_unplanned_one(launched_loads):
    launch, whole = launched_loads
    np.testing.assert_array_equal(launch.workloads[0].load, LOADS.load)
    assert whole.tokens == launch.tokens == 301
    ranks, row = launch.instructions.ranks, launch.instructions.model.bytes_per_token
    for run, plan in zip(whole.runs, launch.instructions.plans, strict=True):
        assert 0 <= run.difference.error <= run.difference.allowed
        for layer in range(LAYERS):
            measured, predicted = (sent(timeline, "dispatch", layer, ranks) for timeline in (run.measured, run.predicted))
            np.testing.assert_allclose(measured, predicted, atol=0 if plan.travel else 6 * row)
            if plan.travel is None:
                copies = launch.workloads[0].demand(ranks)[layer] @ plan.placement.share[layer]
                np.testing.assert_allclose(measured, off_diagonal(copies) * row, atol=6 * row)
        assert len(of(run.measured, "ffn", 0)) == ranks


def test_a_launch_says_that_its_tokens_were_drawn_until_its_results_are_read(launched_loads, tmp_path):
    launch, whole = launched_loads
    text = {check.name: check.text for check in launch.checks}
    assert text["Tokens"].startswith("301 drawn, 1 timed pass") and "every expert has its load of loads; which" in text[ROUTING]
    assert describe_run(whole).routing == whole.routing == launch.routing == text[ROUTING]
    clusters.write(replace(launch, destination=destination("slurm", tmp_path, gpus=0)), tmp_path / "job")
    assert clusters.read_job(tmp_path / "job").routing == text[ROUTING]
    recorded = launches.prepare()
    assert not recorded.routing and "routing" not in describe_run(replace(whole, routing=recorded.routing)).model_dump()


def test_two_models_are_launched_on_workloads_of_different_kinds():
    a, b = launches.recording(), launches.recording_b()
    drawn = ExpertLoad("b", b.load, tuple(range(LAYERS)))
    plan = launches.pair_of("matched", "concurrent", a, b)
    launch = prepared(a, plan, second=(drawn, OTHER), tokens=150)
    first, second = launch.workloads
    assert "150 recorded and " in {check.name: check.text for check in launch.checks}["Tokens"]
    assert first.tokens == 150 and second.tokens == 61, "half of 121, rounded up"


def test_what_a_workload_without_tokens_does_not_tell_is_refused():
    where, ones = of_matrix(), np.ones((LAYERS, EXPERTS))
    plan, of_loads = plan_of(MATRIX, "concurrent", where), plan_of(LOADS, "concurrent", launches.EVEN)
    by_node = plan.model_copy(update={"travel": Travel(unit="gpu")})
    for workload, asked, part in (
        (LOADS, coherent(of_loads), "follows every token from layer to layer, but loads has no tokens"),
        (MATRIX, coherent(plan), "follows every token from layer to layer, but bytes has no tokens"),
        (MATRIX, by_node, "bytes does not tell which rows would be one; launch a plan with --travel copies"),
        (replace(MATRIX, bytes=0 * MATRIX.bytes), plan, "nothing to launch: all its bytes are 0"),
        (replace(LOADS, load=0 * ones), of_loads, "nothing to launch: all its loads are 0"),
        (replace(MATRIX, bytes=MATRIX.bytes / 1e9), plan, "less than a row of 128 bytes to send"),
        (MATRIX, of_loads, "places 8 experts in 3 layers, but the recording bytes has 4 in 3"),
        (replace(MATRIX, bytes=np.ones((LAYERS, 8, 8))), plan_of(LOADS, "concurrent", launches.EVEN), "between 8 ranks"),
        (RoutingTrace("none", np.zeros((0, LAYERS, K), np.int16), EXPERTS), of_loads, "none has no tokens to replay"),
    ):
        assert part in refusal(prepared, workload, asked)


# Training steps.
@pytest.mark.usefixtures("warm_python")
def test_a_step_routed_as_recorded_draws_its_tokens_from_loads(tmp_path):
    step = steps.TOP_ONE_STEP.model_copy(update={"routing": "recorded"})
    loads = ExpertLoad("recorded", np.array([[5.0, 1, 1, 1], [0, 3, 3, 2]]), (1, 2))
    plan = steps.plan_by("raf", steps.top_one_problem())
    launch = steps.prepare_step(plan, step=step, workload=loads, repeats=1)
    (trace,) = launch.workloads
    tokens = launch.instructions.step.tokens
    assert np.bincount(trace.source_rank).tolist() == [tokens, tokens]
    np.testing.assert_array_equal(trace.load, loads.load / 8 * 2 * tokens)
    assert "drawn, not recorded" in said_of_routing(launch) and "routing as recorded" in str(launch.checks)
    (measured,) = run_here(launch, tmp_path / "run", never, silent).runs
    assert 0 <= measured.difference.error <= 1e-4
