"""What a launch says it needs in memory: of GPUs, of the host, and as much as ranks here really take."""

import json
from dataclasses import replace

import pytest

from engine.launch.places.devices import Devices
from engine.launch.preparation.launch import Check, Launch, PreparedLaunch
from engine.launch.preparation.memory import ALL_KERNELS, CODE
from engine.launch.preparation.prepare import prepare
from engine.launch.running import local
from engine.model import MoEModel
from engine.plan import Plan
from engine.result import never
from engine.systems.base import silent
from engine.training import balanced_load
from tests.launch.plans import beside
from tests.launch.test_colocated import OTHER, recording_b
from tests.launch.test_local import EVEN, HOST, MODEL, plan_for, recording
from tests.launch.test_step_launch import MODEL as STEP_MODEL
from tests.launch.test_step_launch import STEP, plan_by, problem_for

GIB = 2.0**30
TRACE, TRACE_B = recording(64), recording_b()


def gpus(*free: float, host: float = 256.0) -> Devices:
    """GPUs with so many GiB free each."""
    return Devices(("H200",) * len(free), tuple(room * GIB for room in free), 16, host * GIB)


def forward(devices: Devices, model: MoEModel = MODEL, ranks: int = 4, **more) -> PreparedLaunch:
    return prepare(Launch((plan_for(TRACE, "concurrent"),), TRACE, model, ranks=ranks, **more), devices)


def two_models(devices: Devices, a: MoEModel = MODEL, b: MoEModel = OTHER, ranks: int = 4) -> PreparedLaunch:
    plan = beside(plan_for(TRACE, "concurrent", model=a), plan_for(TRACE_B, "concurrent", model=b))
    return prepare(Launch((plan,), TRACE, a, second=(TRACE_B, b), ranks=ranks, repeats=1), devices)


def step(devices: Devices, *systems: str, model: MoEModel = STEP_MODEL, **more) -> PreparedLaunch:
    described = STEP.model_copy(update=more)
    plans = tuple(plan_by(name, problem_for(described, model)) for name in systems)
    return prepare(Launch(plans, balanced_load(model), model, step=described, repeats=1), devices)


def check(launch: PreparedLaunch, name: str = "Memory") -> Check:
    return next(check for check in launch.checks if check.name == name)


def gib(launch: PreparedLaunch, name: str = "Memory") -> tuple[float, float]:
    """(of a rank, in all)."""
    words = check(launch, name).text.split()
    return float(words[0]), float(words[4])


# GPUs


def test_every_rank_on_a_gpu_has_a_context_there():
    assert check(forward(gpus(80.0))).passed
    assert not check(forward(gpus(1.0))).passed, "four contexts of some hundred megabytes, whatever the layers take"
    of_rank, in_all = gib(forward(gpus(80.0)))
    assert 0.3 <= of_rank <= 0.7 and 4 * 0.3 <= in_all <= 4 * 0.7


def test_only_gpus_that_ranks_compute_on_are_looked_at():
    assert check(forward(gpus(80.0, 80.0, 0.1), ranks=2)).passed
    assert not check(forward(gpus(80.0, 0.1, 80.0), ranks=2)).passed


def test_where_one_layer_is_too_large_fewer_tokens_are_not_advised():
    small = check(forward(gpus(1e-6)))
    assert not small.passed and "the experts of one layer alone take" in small.text and "fewer" not in small.text
    assert "replay fewer tokens or use fewer ranks" in check(forward(gpus(1.0))).text


def test_communicators_have_buffers_on_gpus():
    """Eight H100 had 4 GB more each after their first all-to-all (github.com/NVIDIA/nccl/issues/1685)."""
    kernels = ALL_KERNELS / GIB
    over_gloo = gib(forward(gpus(80.0)))[0] + kernels
    alone = gib(forward(gpus(*[80.0] * 4)))[0] - over_gloo
    assert 1.5 < alone < 3.0
    pairs = gib(two_models(gpus(*[80.0] * 4)))[0] - gib(two_models(gpus(80.0)))[0] - kernels
    assert pairs == pytest.approx(3 * alone, abs=0.05), "of the launch, and of each model"
    steps = gib(step(gpus(80.0, 80.0), "lancet"))[0] - gib(step(gpus(80.0), "lancet"))[0] - kernels
    two_ranks = gib(forward(gpus(80.0, 80.0), ranks=2))[0] - gib(forward(gpus(80.0), ranks=2))[0] - kernels
    assert steps == pytest.approx(3 * two_ranks, abs=0.05), "of the launch, for all-to-alls, and for gradients"
    assert gib(forward(gpus(80.0), ranks=1))[0] < 0.7 + kernels, "nobody to send to"


# The host


def test_ranks_on_gpus_need_the_host_too():
    launch = forward(gpus(80.0, host=256.0))
    of_rank, in_all = gib(launch, "Host memory")
    assert 0.5 <= of_rank <= 3 and in_all == pytest.approx(4 * of_rank, abs=0.05)
    assert check(launch, "Host memory").passed
    short = forward(gpus(80.0, host=4.0))
    assert short.failed.name == "Host memory" and "fewer ranks" in short.failed.text
    assert not any(check.name == "Host memory" for check in forward(HOST).checks), "there it is the only memory"


def test_what_passes_through_the_host_counts_over_gloo():
    wide, tokens = MODEL.model_copy(update={"d_model": 4096}), recording(60_000)
    plans = (plan_for(tokens, "concurrent", model=wide),)

    def needed(devices: Devices) -> float:
        return gib(prepare(Launch(plans, tokens, wide, ranks=4), devices), "Host memory")[0]

    exchanged = 60_000 / 4 * 2 * 4096 * 2 / GIB  # copies that a rank sends, in bf16
    assert needed(gpus(80.0)) - needed(gpus(*[80.0] * 4)) > 2 * exchanged
    assert needed(gpus(*[80.0] * 4)) - gib(forward(gpus(*[80.0] * 4)), "Host memory")[0] > 60_000 * 4096 * 4 / GIB, (
        "all tokens are made there, in 32 bits"
    )


def test_processes_on_cpus_need_memory_before_they_have_a_tensor():
    assert check(forward(HOST)).passed
    assert not check(forward(replace(HOST, host_memory=1 * GIB))).passed


# Steps


def test_plans_that_place_experts_differently_share_no_weights_of_them():
    def with_another(other: Plan) -> float:
        launch = Launch((plan, other), balanced_load(large), large, step=STEP)
        return gib(prepare(launch, replace(HOST, host_memory=1000 * GIB)))[0]

    large = STEP_MODEL.model_copy(update={"d_model": 1024, "d_ff": 8192})
    plan = plan_by("lancet", problem_for(STEP, large))
    rows = tuple(tuple(reversed(row)) for row in plan.placement.experts_of_gpu)
    swapped = plan.placement.model_copy(update={"experts_of_gpu": rows})
    held = 2 * 2 * 2 * 1024 * 8192 * 8 / GIB  # two experts in each of two layers, with momentum, in fp32
    assert with_another(plan.model_copy(update={"placement": swapped})) - with_another(plan) == pytest.approx(
        held, abs=0.02
    )


# Real ranks


def launches() -> dict[str, PreparedLaunch]:
    """Of sizes at which weights are most of what ranks have."""
    host, large = replace(HOST, host_memory=64 * GIB), {"d_model": 1024, "d_ff": 2048}
    a, b = MODEL.model_copy(update=large), OTHER.model_copy(update=large)
    plan = plan_for(TRACE, "concurrent", EVEN, a)
    carried = plan.model_copy(update={"execution": "context-coherent"})
    both = Launch((plan, carried), TRACE, a, ranks=2, repeats=1)
    dense = {"dense_d_ff": 1024, "vocabulary": 1000}
    small = STEP_MODEL.model_copy(update={"d_model": 1024, "d_ff": 2048, "ffn_matrices": 3})
    return {
        "forward and context-coherent": prepare(both, host),
        "two models": two_models(host, a, b, ranks=2),
        "a step": step(host, "lina", model=small, **dense),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward and context-coherent", "two models", "a step"])
def test_ranks_take_what_was_said(name, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "WORKER", "tests.launch.memory_ranks")
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")  # every thread of a product has room of its own
    launch = launches()[name]
    of_rank, in_all = gib(launch)
    local.run_here(launch, tmp_path / "run", never, silent)
    taken = [json.loads((tmp_path / "run" / f"memory-{rank}.json").read_text()) / GIB for rank in range(2)]
    ratios = (in_all - of_rank - CODE / GIB) / taken[0], of_rank / taken[1]
    assert all(0.9 <= ratio <= 2 for ratio in ratios), f"of rank 0, which compares, and of rank 1: {ratios}"
