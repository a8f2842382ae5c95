"""Launches before anything runs: two models, other numbers, shared GPUs, the way to a job, and the checks of the place."""

import json
import socket
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from engine import store
from engine.errors import InputError
from engine.launch.places import testbed
from engine.launch.places.devices import Devices
from engine.launch.places.testbed import Testbed
from engine.launch.preparation import inference, place_checks
from engine.launch.preparation.launch import Check, Launch, PreparedLaunch
from engine.launch.preparation.prepare import prepare as prepared
from engine.launch.results.prediction import fit_profile, predict
from engine.model import MoEModel
from engine.network import off_diagonal
from engine.plan import Plan
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.cluster_launches import destination
from tests.cases.launch_plans import beside
from tests.cases.launches import EXPERTS, HOST, LAYERS, MODEL, OTHER, UNEVEN, K, pair_of, plan_for, recording, recording_b
from tests.cases.refusals import refusal
from tests.cases.testbeds import cluster_of, needs_testbed, own_namespaces

TRACE, TRACE_B = recording(), recording_b()
GIB = 2.0**30


def gpus(count: int) -> Devices:
    return Devices(gpus=("H200",) * count, memory=(80 * GIB,) * count, cores=16, host_memory=64 * GIB)


def both(mode: str = "matched") -> Plan:
    return pair_of(mode, mode, TRACE, TRACE_B)


def prepare(plan: Plan | None = None, ranks: int | None = 2, devices: Devices = HOST, **more) -> PreparedLaunch:
    """A launch of two models unless a plan is given."""
    if plan is None:
        plan, more = both(), {"second": (TRACE_B, OTHER)} | more
    return inference.prepare_inference(Launch((plan,), TRACE, MODEL, ranks=ranks, **more), devices)


def check(launch: PreparedLaunch, name: str) -> Check:
    return next(check for check in launch.checks if check.name == name)


# Two models
def test_two_models_are_replayed_to_the_same_part():
    launch = prepare(tokens=100)
    assert [workload.tokens for workload in launch.workloads] == [100, 50]
    assert check(launch, "Tokens").text.startswith("100 and 50 of the two recordings")
    assert launch.instructions.model_b.name == "other" and launch.instructions.model_b.dtype == "fp32"
    (folded,) = launch.instructions.plans
    assert folded.placement_b.gpus == 2 and folded.placement_b.experts == EXPERTS
    assert launch.workloads[1].source_rank.max() == 1
    assert [workload.tokens for workload in prepare(tokens=1).workloads] == [1, 1]


def test_the_budget_is_for_both_models(monkeypatch):
    per_token = LAYERS * K * MODEL.ffn_flops_per_token + LAYERS * OTHER.ffn_flops_per_token / 2
    monkeypatch.setattr(inference, "FLOP_BUDGET", 60.5 * per_token)
    assert [workload.tokens for workload in prepare().workloads] == [60, 30]


def test_memory_is_for_both_models():
    def need(model: MoEModel) -> float:
        other = both().model_copy(update={"send_order": both().send_order_b, "placement": both().placement_b})
        launch = prepare(beside(plan_for(TRACE, "concurrent"), other), second=(TRACE_B, model))
        return float(check(launch, "Memory").text.split()[0])

    large = OTHER.model_copy(update={"d_model": 4096, "d_ff": 8192})
    held = 6 * large.model_copy(update={"dtype": "fp32"}).bytes_per_expert / GIB  # slots 4 and 2 of the first two GPUs
    assert held * 0.8 < need(large) - need(OTHER) < held * 1.6


def test_several_plans_of_two_models_share_a_launch_and_none_of_one():
    two, second = (both("matched"), both("concurrent")), (TRACE_B, OTHER)
    launch = inference.prepare_inference(Launch(two, TRACE, MODEL, second=second, ranks=2), HOST)
    assert len(launch.instructions.plans) == 2
    mixed = Launch((two[0], plan_for(TRACE, "concurrent")), TRACE, MODEL, second=second, ranks=2)
    assert "concurrent is for one model, but two recordings" in refusal(inference.prepare_inference, mixed, HOST)
    assert "is for two models; give the second" in refusal(prepare, both())


@pytest.mark.parametrize("mode", ["shared", "two-tier"])
def test_an_order_for_one_model_alone_is_refused_for_two_models(mode):
    for name in ("send_order", "send_order_b"):
        order = getattr(both(), name).model_copy(update={"mode": mode})
        assert f"has a {mode} order" in refusal(prepare, both().model_copy(update={name: order}), second=(TRACE_B, OTHER))


def test_a_second_recording_that_does_not_fit():
    shallow = OTHER.model_copy(update={"layers": 2})
    for trace, model, message in (
        (ExpertLoad("loads", np.zeros((LAYERS, EXPERTS)), tuple(range(LAYERS))), OTHER, "loads has nothing to launch"),
        (RoutingTrace("nothing", TRACE_B.experts[:0], EXPERTS), OTHER, "nothing has no tokens"),
        (TRACE_B, shallow, "other does not fit the recording b"),
        (RoutingTrace("short", TRACE_B.experts[:, :2], EXPERTS), shallow, "3 layers, but the recording short has 8 in 2"),
    ):
        assert message in refusal(prepare, both(), second=(trace, model))
    # As many layers each, but not as many experts: both placements fit their recordings.
    fewer = RoutingTrace("fewer", np.minimum(TRACE_B.experts, 3), 4)
    model = OTHER.model_copy(update={"experts": 4})
    rows = (((0,), (1,), (2,), (3,)),) * LAYERS
    placed = both().placement_b.model_copy(update={"experts": 4, "experts_of_gpu": rows})
    message = refusal(prepare, both("concurrent").model_copy(update={"placement_b": placed}), second=(fewer, model))
    assert "8 experts in 3 MoE layers, fewer has 4 in 3" in message


@pytest.mark.parametrize(
    ("backend", "mode", "overlap"),
    [("gloo", "matched", True), ("gloo", "concurrent", True), ("nccl", "matched", False), ("nccl", "concurrent", True)],
)
def test_the_prediction_lets_two_models_overlap_where_their_backend_does(backend, mode, overlap):
    launch = prepare(both(mode), second=(TRACE_B, OTHER))
    launch = replace(launch, instructions=launch.instructions.model_copy(update={"backend": backend}))
    measured = {name: [[1.0, 1e-4], [1e6, 1e-2]] for name in ("gemm", "gate", "memory", "network", "phases")}
    measured["meetings"] = [[0, 1e-4], [1, 2e-4]]
    profile = fit_profile(measured, "CPU", launch.instructions, 2)
    events = predict(launch, launch.instructions.plans[0], profile, measured).events
    sends = events[events["stream"] == "network"].groupby(["kind", "model", "layer"], observed=True)
    start, end = sends["start"].min(), sends["end"].max()
    assert ((start["dispatch", 1] < end["dispatch", 0]) == overlap).all()


# Numbers and devices
def test_numbers_are_told_with_the_difference_they_may_make():
    assert "fp32" in check(prepare(), "Numbers").text and "0.0001" in check(prepare(), "Numbers").text
    launch = prepare(dtype="bf16")
    assert launch.instructions.model.dtype == launch.instructions.model_b.dtype == "bf16"
    numbers = check(launch, "Numbers").text
    assert "bf16" in numbers and "3 times as far from that as an unplanned" in numbers
    on_gpus = prepare(ranks=4, devices=gpus(4), dtype="fp32")
    assert on_gpus.instructions.backend == "nccl" and on_gpus.instructions.model.dtype == "fp32"
    assert "fp8: a launch computes in fp32 or bf16" in refusal(prepare, dtype="fp8")


def test_ranks_that_share_gpus_compute_there_and_talk_over_gloo():
    launch = prepare(ranks=None, devices=gpus(1))
    instructions = launch.instructions
    assert (instructions.ranks, instructions.backend, instructions.gpus) == (4, "gloo", 1)
    assert (instructions.device, instructions.model.dtype) == ("cuda", "bf16")
    assert "4 ranks on 1 GPU in turn" in check(launch, "Backend").text and "host memory" in check(launch, "Backend").text
    assert launch.ready and launch.workloads[0].tokens == TRACE.tokens
    for ranks, devices, *wanted in (
        (1, gpus(1), "nccl", 1, "cuda"),
        (3, gpus(2), "gloo", 2, "cuda"),
        (2, HOST, "gloo", 0, "cpu"),
    ):
        own = prepare(ranks=ranks, devices=devices).instructions
        assert [own.backend, own.gpus, own.device] == wanted


def test_ranks_on_one_gpu_need_its_memory_together():
    large = MODEL.model_copy(update={"d_model": 4096, "d_ff": 8192})
    plan = plan_for(TRACE, "concurrent")

    def on(count: int, memory: float) -> Check:
        devices = replace(gpus(count), memory=(memory,) * count)
        return check(inference.prepare_inference(Launch((plan,), TRACE, large, ranks=4), devices), "Memory")

    of_rank = float(on(1, 80 * GIB).text.split()[0]) * GIB
    for count, together in ((1, 4), (2, 2), (3, 2), (4, 1)):
        needed = float(on(count, 80 * GIB).text.split()[4]) * GIB
        assert needed > 0.99 * together * of_rank, "and what rank 0 compares with"
        assert float(on(count, 1.3 * needed).text.split()[4]) * GIB == needed
        assert float(on(count, 1.2 * needed).text.split()[4]) * GIB < 0.9 * needed, "the model is narrowed"


def test_what_ranks_share_is_a_processor_for_the_prediction():
    points = {name: [[1.0, 1e-3], [2.0, 2e-3]] for name in ("gemm", "gate", "memory", "network")}
    for count, ranks, wanted in ((0, 2, 6), (1, 4, 1), (2, 3, 2), (4, 4, 4)):
        devices = gpus(count) if count else HOST
        assert fit_profile(points, "any", prepare(ranks=ranks, devices=devices).instructions, 6).cores == wanted


# Places.
PLANS = (plan_for(TRACE, "matched"), plan_for(TRACE, "concurrent", UNEVEN))
DRAWN = cluster_of(50e9, 25e9, 10e9, 10e9)


def asked(**more) -> Launch:
    return Launch(PLANS, TRACE, MODEL, DRAWN, **more)


def arguments_of(launch: Launch) -> dict:
    """As they arrive at a job."""
    return json.loads(json.dumps(launch.to_arguments()))


@pytest.mark.parametrize("on", ["local", "testbed", "slurm", "kubernetes"])
def test_what_is_asked_for_survives_the_way_to_a_job(on, tmp_path):
    where = destination(on, tmp_path) if on in ("slurm", "kubernetes") else None
    numbers = {"ranks": 3, "tokens": 50, "repeats": 2, "limit": 33.0, "dtype": "bf16", "scale": 700.0}
    launch = asked(on=on, destination=where, second=(TRACE, MODEL), **numbers)
    store.save_workload(TRACE)
    again = Launch.from_arguments(arguments_of(launch))
    assert again.plans == PLANS and again.model == MODEL and again.cluster == DRAWN and again.destination == where
    assert again.workload.digest == again.second[0].digest == TRACE.digest and again.second[1] == MODEL
    assert again.on == on and numbers == {name: getattr(again, name) for name in numbers}


def test_a_place_that_is_none_and_a_recording_that_is_gone_are_refused():
    read, arguments = Launch.from_arguments, arguments_of(asked())
    assert "no longer in the data folder" in refusal(read, arguments)
    store.save_workload(TRACE)
    assert "not on 'the moon'" in refusal(read, arguments | {"on": "the moon"})
    nowhere = {"on": "slurm", "destination": {"scheduler": "slurm"}}
    assert "slurm: nodes: Field required" in refusal(read, arguments | nowhere)


def test_slots_are_those_of_the_fullest_layer_and_plan():
    assert check(prepared(asked(ranks=4), HOST), "Slots").text.startswith("of a layer's 8 experts, 4, 2, 2, 2 on ranks")


def test_a_port_of_this_machine_is_tried(monkeypatch):
    launch = prepared(asked(ranks=2), HOST)
    assert check(launch, "Port").passed and "torchrun picks" in check(launch, "Port").text
    monkeypatch.setattr(socket.socket, "bind", mock.MagicMock(side_effect=OSError(98, "Address already in use")))
    launch = prepared(asked(ranks=2), HOST)
    assert not launch.ready and "no port of localhost can be had (Address already in use)" in check(launch, "Port").text


def test_a_testbed_has_the_drawn_links_and_no_gpus_and_need_not_be_built_to_be_checked(monkeypatch):
    monkeypatch.setattr(Testbed, "_build", None)
    gpus = replace(HOST, gpus=("H200",) * 4, memory=(80e9,) * 4)
    launch = prepared(asked(on="testbed", ranks=4, scale=1000.0), gpus)
    assert launch.instructions.backend == "gloo"
    np.testing.assert_allclose(launch.testbed.bandwidth, [50e6, 25e6, 10e6, 10e6])
    assert check(launch, "Port").passed


def test_a_testbed_too_slow_for_its_time_limit_is_found_out_before():
    launch = prepared(asked(on="testbed", ranks=4, scale=100_000.0, repeats=1, limit=900.0), HOST)
    link_check = check(launch, "Links")
    assert link_check.passed
    least, size = 0.0, launch.instructions.model.bytes_per_token
    for plan in launch.instructions.plans:
        for rows in map(off_diagonal, TRACE.demand(4) @ plan.placement.share):
            least += 2 * max(np.maximum(rows.sum(axis=0), rows.sum(axis=1)) * size / launch.testbed.bandwidth)
    assert place_checks.seconds(least) in link_check.text and place_checks.seconds(2 * least) in link_check.text
    limit = 2 * least / 0.81
    launch = prepared(asked(on="testbed", ranks=4, scale=100_000.0, repeats=1, limit=limit), HOST)
    assert not launch.ready and "replay fewer tokens" in check(launch, "Links").text


def test_an_order_that_drawn_links_make_slow_is_a_warning_and_no_obstacle(tmp_path):
    slow = replace(asked(), plans=(plan_for(TRACE, "sequential"),))
    launch = prepared(replace(slow, on="testbed", ranks=4), HOST)
    order_check = check(launch, "Order")
    assert order_check.warning and order_check.passed and launch.ready
    assert "as long in its all-to-alls" in order_check.text
    launch = prepared(replace(slow, on="local", ranks=4), HOST)
    assert not [check for check in launch.checks if check.warning]
    where = destination("slurm", tmp_path, nodes=2, ranks_per_node=2, gpus=0)
    launch = prepared(replace(slow, on="slurm", destination=where), HOST)
    assert launch.testbed is None and launch.instructions.ranks == 4
    assert "the nodes meet on the first one" in check(launch, "Port").text
    assert check(launch, "Shared folder").passed


@needs_testbed
def test_whether_a_testbed_can_be_built_is_tried(monkeypatch):
    assert place_checks.testbed_fault() is None and not own_namespaces()
    monkeypatch.setattr(testbed, "_shape", mock.MagicMock(side_effect=InputError("no such module")))
    assert place_checks.testbed_fault() == "no such module" and not own_namespaces()
