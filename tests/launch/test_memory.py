"""Memory: a rank holds one layer of a model at once, and launches that do not fit are refused."""

import json
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.launch.places.devices import Devices
from engine.launch.preparation.launch import Check, Launch, PreparedLaunch
from engine.launch.preparation.memory import ALL_KERNELS, CODE
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.coherent import Coherent
from engine.launch.rank.colocated import Colocated
from engine.launch.rank.context import Executor, RankContext
from engine.launch.rank.forward import Forward
from engine.launch.rank.instructions import RankInstructions, Tokens
from engine.launch.rank.layer import Weights
from engine.launch.rank.layers import Layers
from engine.launch.running import local
from engine.launch.step.run import StepExecutor
from engine.model import MoEModel
from engine.plan import Placement, Plan, Reaction, Travel
from engine.result import never
from engine.runtime.exchange.recorder import Recorder
from engine.systems.base import silent
from engine.training import balanced_load
from engine.workload import RoutingTrace
from tests import everything, warm
from tests.cases import steps
from tests.cases.launch_plans import beside
from tests.cases.launches import EVEN, EXPERTS, HOST, LAYERS, MODEL, OTHER, plan_for, recording, recording_b
from tests.cases.steps import TOP_ONE_MODEL as STEP_MODEL
from tests.cases.steps import TOP_ONE_STEP, plan_by, top_one_problem
from tests.launch.step_ranks import CPU

ALONE = ((tuple(range(EXPERTS)),),) * LAYERS


@pytest.fixture
def living(monkeypatch) -> dict[Weights, list[int]]:
    """The number of tensors of a model's layers that live whenever experts of another layer are made."""
    counts, made, experts, buffer = defaultdict(list), defaultdict(list), Weights.experts, Layers._buffer

    def counting(weights: Weights, *which) -> tuple[torch.Tensor, torch.Tensor]:
        counts[weights].append(sum(tensor() is not None for tensor in made[weights]))
        both = experts(weights, *which)
        made[weights] += map(weakref.ref, both)
        return both

    def noting(layers: Layers, *which) -> torch.Tensor:
        room = buffer(layers, *which)
        made[layers.weights].append(weakref.ref(room))
        return room

    monkeypatch.setattr(Weights, "experts", counting)
    monkeypatch.setattr(Layers, "_buffer", noting)
    return counts


def placed(plan: Plan) -> Plan:
    """All experts on one rank."""
    alone = Placement(experts=EXPERTS, experts_of_gpu=ALONE, model_layers=plan.placement.model_layers)
    both = {"placement": alone} | ({} if plan.placement_b is None else {"placement_b": alone})
    return plan.model_copy(update=both)


def context_of(plan: Plan, *traces: RoutingTrace, **more) -> RankContext:
    instructions = RankInstructions(plans=(plan,), ranks=1, backend="gloo", **more)
    tokens = tuple(Tokens(trace.experts, trace.rank_of_token(1)) for trace in traces)
    return RankContext(instructions, tokens, 0, CPU, Recorder(0, CPU))


@torch.inference_mode()
def twice(kind: Callable[[RankContext, Plan], Executor], context: RankContext, plan: Plan) -> None:
    executor = kind(context, plan)
    for _ in range(2):
        executor.run(lambda done, message: None)


@pytest.mark.parametrize(("kind", "travel"), [(Forward, None), (Forward, Travel(unit="gpu")), (Coherent, None)])
def test_a_layer_is_gone_before_the_next_one_is_made(one_rank, living, kind, travel):
    trace = recording(40)
    plan = placed(plan_for(trace, "concurrent").model_copy(update={"travel": travel}))
    twice(kind, context_of(plan, trace, model=MODEL), plan)
    (counts,) = living.values()
    assert counts == [0] * (2 * LAYERS), "also between two passes, where the layers of another plan may come"


def test_of_each_of_two_models_a_layer_is_gone_before_its_next_one_is_made(one_rank, living):
    trace, other = recording(40), recording_b()
    plan = placed(beside(plan_for(trace, "concurrent"), plan_for(other, "concurrent", model=OTHER)))
    twice(Colocated, context_of(plan, trace, other, model=MODEL, model_b=OTHER), plan)
    assert list(living.values()) == [[0] * (2 * LAYERS)] * 2


def test_the_experts_of_a_step_are_made_one_by_one(one_rank, monkeypatch):
    """A step brings its weights anew from the second time on: besides them there is room for one expert."""
    asked, experts = [], Weights.experts
    monkeypatch.setattr(Weights, "experts", lambda own, layer, which: asked.append(len(which)) or experts(own, layer, which))
    alone = Placement(experts=8, experts_of_gpu=((tuple(range(8)),),) * 2, model_layers=(1, 2))
    plan = steps.plan_of(alone)
    trace = RoutingTrace("any", recording(60).experts[:, :2], 8)
    twice(StepExecutor, context_of(plan, trace, model=steps.MODEL, step=steps.STEP), plan)
    assert len(asked) == 2 * 2 * 2 * 8 and set(asked) == {1}


# Before anything runs.
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
    described = TOP_ONE_STEP.model_copy(update=more)
    plans = tuple(plan_by(name, top_one_problem(described, model)) for name in systems)
    return prepare(Launch(plans, balanced_load(model), model, step=described, repeats=1), devices)


def check(launch: PreparedLaunch, name: str = "Memory") -> Check:
    return next(check for check in launch.checks if check.name == name)


def gib(launch: PreparedLaunch, name: str = "Memory") -> tuple[float, float]:
    """(of a rank, in all)."""
    words = check(launch, name).text.split()
    return float(words[0]), float(words[4])


# GPUs.
def test_every_rank_on_a_gpu_has_a_context_there_and_advice_suits_what_is_short():
    assert check(forward(gpus(80.0))).passed
    assert not check(forward(gpus(1.0))).passed, "four contexts of some hundred megabytes, whatever the layers take"
    of_rank, in_all = gib(forward(gpus(80.0)))
    assert 0.3 <= of_rank <= 0.7 and 4 * 0.3 <= in_all <= 4 * 0.7
    # Only GPUs that ranks compute on are looked at.
    assert check(forward(gpus(80.0, 80.0, 0.1), ranks=2)).passed
    assert not check(forward(gpus(80.0, 0.1, 80.0), ranks=2)).passed
    # Where one layer is too large, fewer tokens are not advised.
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
    assert check(forward(HOST)).passed, "processes on CPUs need memory before they have a tensor"
    assert not check(forward(replace(HOST, host_memory=1 * GIB))).passed


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


# Steps
def test_plans_that_place_experts_differently_share_no_weights_of_them():
    def with_another(other: Plan) -> float:
        launch = Launch((plan, other), balanced_load(large), large, step=TOP_ONE_STEP)
        return gib(prepare(launch, replace(HOST, host_memory=1000 * GIB)))[0]

    large = STEP_MODEL.model_copy(update={"d_model": 1024, "d_ff": 8192})
    plan = plan_by("lancet", top_one_problem(TOP_ONE_STEP, large))
    rows = tuple(tuple(reversed(row)) for row in plan.placement.experts_of_gpu)
    swapped = plan.placement.model_copy(update={"experts_of_gpu": rows})
    held = 2 * 2 * 2 * 1024 * 8192 * 8 / GIB  # two experts in each of two layers, with momentum, in fp32
    more = with_another(plan.model_copy(update={"placement": swapped})) - with_another(plan)
    assert more == pytest.approx(held, abs=0.02)


# Real ranks
def launches() -> dict[str, PreparedLaunch]:
    """A launch with weights that take most of the ranks' memory."""
    host, large = replace(HOST, host_memory=64 * GIB), {"d_model": 1024, "d_ff": 2048}
    a, b = MODEL.model_copy(update=large), OTHER.model_copy(update=large)
    plan = plan_for(TRACE, "concurrent", EVEN, a)
    carried = plan.model_copy(update={"execution": "context-coherent"})
    both = Launch((plan, carried), TRACE, a, ranks=2, repeats=1)
    reaction = Reaction(path_length=1, top_k=2, check_experts=4, max_experts_per_device=3, batch=32)
    hosted = Launch((plan.model_copy(update={"reaction": reaction}),), TRACE, a, ranks=2, repeats=1)
    dense = {"dense_d_ff": 1024, "vocabulary": 1000}
    small = STEP_MODEL.model_copy(update={"d_model": 1024, "d_ff": 2048, "ffn_matrices": 3})
    return {
        "forward and context-coherent": prepare(both, host),
        "two models": two_models(host, a, b, ranks=2),
        "Lina's scheduler": prepare(hosted, host),
        "a step": step(host, "lina", model=small, **dense),
    }


IMPORTED = 161e6
"""Bytes of its own that a rank has when it has imported everything."""
HEAVY = (pytest.param(name, marks=pytest.mark.everything) for name in ("two models", "Lina's scheduler", "a step"))


@pytest.mark.parametrize("name", ["forward and context-coherent", *HEAVY])
def test_ranks_take_what_was_said(name, tmp_path, monkeypatch, warm_python):
    monkeypatch.setattr(local, "WORKER", "tests.launch.memory_ranks")
    if everything.WANTED:  # a rank's memory is its own; what a warm one begins with it shares with others
        monkeypatch.setenv("PYTHON_EXEC", warm.INTERPRETER)
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")  # every thread of a product has room of its own
    launch = launches()[name]
    of_rank, in_all = gib(launch)
    local.run_here(launch, tmp_path / "run", never, silent)
    begun, most = zip(*(json.loads((tmp_path / "run" / f"memory-{rank}.json").read_text()) for rank in range(2)), strict=True)
    if everything.WANTED:
        assert begun == pytest.approx((IMPORTED, IMPORTED), rel=0.2)
    taken = [(IMPORTED + most[rank] - begun[rank]) / GIB for rank in range(2)]
    ratios = (in_all - of_rank - CODE / GIB) / taken[0], of_rank / taken[1]
    assert all(0.9 <= ratio <= 2 for ratio in ratios), f"of rank 0, which compares, and of rank 1: {ratios}"
