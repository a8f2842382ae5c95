"""Launches of two models, of other numbers and on shared GPUs, before anything runs."""

from dataclasses import replace

import numpy as np
import pytest

from engine.errors import InputError
from engine.launch.places.devices import Devices
from engine.launch.preparation import inference
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.results.prediction import fit_profile, predict
from engine.model import MoEModel
from engine.plan import Plan
from engine.timeline import Timeline
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.launch_plans import beside
from tests.cases.launches import EXPERTS, HOST, LAYERS, MODEL, OTHER, K, pair_of, plan_for, recording, recording_b

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


def text_of(launch: PreparedLaunch, name: str) -> str:
    return next(check.text for check in launch.checks if check.name == name)


# Two models
def test_two_models_are_replayed_to_the_same_part():
    launch = prepare(tokens=100)
    assert [workload.tokens for workload in launch.workloads] == [100, 50]
    assert text_of(launch, "Tokens").startswith("100 and 50 of the two recordings")
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
        return float(text_of(launch, "Memory").split()[0])

    large = OTHER.model_copy(update={"d_model": 4096, "d_ff": 8192})
    held = 6 * large.model_copy(update={"dtype": "fp32"}).bytes_per_expert / GIB  # slots 4 and 2 of the first two GPUs
    assert held * 0.8 < need(large) - need(OTHER) < held * 1.6


def test_several_plans_of_two_models_share_a_launch_and_none_of_one():
    two, second = (both("matched"), both("concurrent")), (TRACE_B, OTHER)
    launch = inference.prepare_inference(Launch(two, TRACE, MODEL, second=second, ranks=2), HOST)
    assert len(launch.instructions.plans) == 2
    with pytest.raises(InputError, match="concurrent is for one model, but two recordings"):
        plans = (two[0], plan_for(TRACE, "concurrent"))
        inference.prepare_inference(Launch(plans, TRACE, MODEL, second=second, ranks=2), HOST)
    with pytest.raises(InputError, match="is for two models; give the second"):
        inference.prepare_inference(Launch(two, TRACE, MODEL, ranks=2), HOST)


@pytest.mark.parametrize("mode", ["shared", "two-tier"])
def test_an_order_for_one_model_alone_is_refused_for_two_models(mode):
    for name in ("send_order", "send_order_b"):
        plan = both()
        order = getattr(plan, name).model_copy(update={"mode": mode})
        with pytest.raises(InputError, match=f"has a {mode} order") as caught:
            prepare(plan=plan.model_copy(update={name: order}), second=(TRACE_B, OTHER))
        assert "\n" not in str(caught.value)


def test_a_second_recording_that_does_not_fit():
    shallow = OTHER.model_copy(update={"layers": 2})
    for trace, model, message in (
        (ExpertLoad("loads", np.ones((LAYERS, EXPERTS)), tuple(range(LAYERS))), OTHER, "loads has no tokens"),
        (RoutingTrace("nothing", TRACE_B.experts[:0], EXPERTS), OTHER, "nothing has no tokens"),
        (TRACE_B, shallow, "other does not fit the recording b"),
        (RoutingTrace("short", TRACE_B.experts[:, :2], EXPERTS), shallow, "3 layers, but the recording short has 8 in 2"),
    ):
        with pytest.raises(InputError, match=message):
            prepare(plan=both(), second=(trace, model))
    # As many layers each, but not as many experts: both placements fit their recordings.
    fewer = RoutingTrace("fewer", np.minimum(TRACE_B.experts, 3), 4)
    model = OTHER.model_copy(update={"experts": 4})
    row = ((0,), (1,), (2,), (3,))
    placed = both().placement_b.model_copy(update={"experts": 4, "experts_of_gpu": (row,) * LAYERS})
    with pytest.raises(InputError, match="8 experts in 3 MoE layers, fewer has 4 in 3"):
        prepare(plan=both("concurrent").model_copy(update={"placement_b": placed}), second=(fewer, model))


def predicted(launch: PreparedLaunch) -> Timeline:
    """The timeline of its first plan on a machine with the speeds of today."""
    measured = {name: [[1.0, 1e-4], [1e6, 1e-2]] for name in ("gemm", "gate", "memory", "network", "phases")}
    measured["meetings"] = [[0, 1e-4], [1, 2e-4]]
    profile = fit_profile(measured, "CPU", launch.instructions, 2)
    return predict(launch, launch.instructions.plans[0], profile, measured)


@pytest.mark.parametrize(
    ("backend", "mode", "overlap"),
    [("gloo", "matched", True), ("gloo", "concurrent", True), ("nccl", "matched", False), ("nccl", "concurrent", True)],
)
def test_the_prediction_lets_two_models_overlap_where_their_backend_does(backend, mode, overlap):
    launch = prepare(both(mode), second=(TRACE_B, OTHER))
    instructions = launch.instructions.model_copy(update={"backend": backend})
    events = predicted(replace(launch, instructions=instructions)).events
    sends = events[events["stream"] == "network"].groupby(["kind", "model", "layer"], observed=True)
    start, end = sends["start"].min(), sends["end"].max()
    assert ((start["dispatch", 1] < end["dispatch", 0]) == overlap).all()


@pytest.mark.parametrize("mode", ["matched", "sequential", "concurrent"])
def test_the_prediction_of_two_models_has_the_work_of_both(mode):
    launch = prepare(both(mode), second=(TRACE_B, OTHER))
    timeline = predicted(launch)
    instructions, (plan,) = launch.instructions, launch.instructions.plans
    models, placements = (instructions.model, instructions.model_b), (plan.placement, plan.placement_b)
    for number, (trace, model, placement) in enumerate(zip(launch.workloads, models, placements, strict=True)):
        events = timeline.events[timeline.events["model"] == number]
        rows = trace.demand(2) @ placement.share
        sent = events[events["kind"] == "dispatch"]["bytes"].sum() / model.bytes_per_token
        assert sent == pytest.approx(rows.sum() - np.trace(rows, axis1=1, axis2=2).sum())
        assert (events["kind"] == "ffn").sum() == 2 * LAYERS
    assert timeline.resources == ("rank 0", "rank 1")


# Numbers and devices
def test_numbers_are_told_with_the_difference_they_may_make():
    assert "fp32" in text_of(prepare(), "Numbers") and "0.0001" in text_of(prepare(), "Numbers")
    launch = prepare(dtype="bf16")
    assert launch.instructions.model.dtype == launch.instructions.model_b.dtype == "bf16"
    numbers = text_of(launch, "Numbers")
    assert "bf16" in numbers and "3 times as far from that as an unplanned" in numbers
    on_gpus = prepare(ranks=4, devices=gpus(4), dtype="fp32")
    assert on_gpus.instructions.backend == "nccl" and on_gpus.instructions.model.dtype == "fp32"
    with pytest.raises(InputError, match="fp8: a launch computes in fp32 or bf16"):
        prepare(dtype="fp8")


def test_ranks_that_share_gpus_compute_there_and_talk_over_gloo():
    launch = prepare(ranks=None, devices=gpus(1))
    instructions = launch.instructions
    assert (instructions.ranks, instructions.backend, instructions.gpus) == (4, "gloo", 1)
    assert (instructions.device, instructions.model.dtype) == ("cuda", "bf16")
    assert "4 ranks on 1 GPU in turn" in text_of(launch, "Backend") and "host memory" in text_of(launch, "Backend")
    assert launch.ready and launch.workloads[0].tokens == TRACE.tokens
    alone = prepare(ranks=1, devices=gpus(1)).instructions
    assert (alone.backend, alone.gpus, alone.device) == ("nccl", 1, "cuda")
    three = prepare(ranks=3, devices=gpus(2)).instructions
    assert (three.backend, three.gpus) == ("gloo", 2)
    cpu = prepare().instructions
    assert (cpu.backend, cpu.gpus, cpu.device) == ("gloo", 0, "cpu")


def test_ranks_on_one_gpu_need_its_memory_together():
    large = MODEL.model_copy(update={"d_model": 4096, "d_ff": 8192})
    plan = plan_for(TRACE, "concurrent")

    def check(count: int, memory: float):
        devices = replace(gpus(count), memory=(memory,) * count)
        launch = inference.prepare_inference(Launch((plan,), TRACE, large, ranks=4), devices)
        return next(check for check in launch.checks if check.name == "Memory")

    of_rank = float(check(1, 80 * GIB).text.split()[0]) * GIB
    for count, together in ((1, 4), (2, 2), (3, 2), (4, 1)):
        needed = float(check(count, 80 * GIB).text.split()[4]) * GIB
        assert needed > 0.99 * together * of_rank, "and what rank 0 compares with"
        assert check(count, 1.3 * needed).passed and not check(count, 1.2 * needed).passed


def test_what_ranks_share_is_a_processor_for_the_prediction():
    points = {name: [[1.0, 1e-3], [2.0, 2e-3]] for name in ("gemm", "gate", "memory", "network")}
    for count, ranks, wanted in ((0, 2, 6), (1, 4, 1), (2, 3, 2), (4, 4, 4)):
        devices = gpus(count) if count else HOST
        assert fit_profile(points, "any", prepare(ranks=ranks, devices=devices).instructions, 6).cores == wanted
