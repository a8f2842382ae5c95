"""What a rank has in memory at once: one layer of a model, whatever is run."""

import weakref
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from engine.launch.rank.coherent import Coherent
from engine.launch.rank.colocated import Colocated
from engine.launch.rank.context import Executor, RankContext
from engine.launch.rank.forward import Forward
from engine.launch.rank.instructions import RankInstructions, Tokens
from engine.launch.rank.layer import Weights
from engine.launch.rank.layers import Layers
from engine.launch.rank.recorder import Recorder
from engine.launch.step.run import StepExecutor
from engine.plan import Placement, Plan, Travel
from engine.workload import RoutingTrace
from tests.launch.plans import beside
from tests.launch.step_ranks import CPU
from tests.launch.test_colocated import OTHER, recording_b
from tests.launch.test_local import EXPERTS, LAYERS, MODEL, plan_for, recording
from tests.launch.test_step import MODEL as STEP_MODEL
from tests.launch.test_step import STEP
from tests.launch.test_step import plan_of as step_plan_of

ALONE = ((tuple(range(EXPERTS)),),) * LAYERS


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """This process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with torch.inference_mode():
        yield
    dist.destroy_process_group()


@pytest.fixture
def living(monkeypatch) -> dict[Weights, list[int]]:
    """How many tensors of a model's layers live when experts of another one are made, of every time."""
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


def tokens_of(trace: RoutingTrace) -> Tokens:
    return Tokens(trace.experts, trace.rank_of_token(1))


def context_of(plan: Plan, *traces: RoutingTrace, **more) -> RankContext:
    instructions = RankInstructions(plans=(plan,), ranks=1, backend="gloo", **more)
    return RankContext(instructions, tuple(map(tokens_of, traces)), 0, CPU, Recorder(0, CPU))


def twice(executor: Executor) -> None:
    for _ in range(2):
        executor.run(lambda done, message: None)


@pytest.mark.parametrize(("kind", "travel"), [(Forward, None), (Forward, Travel(unit="gpu")), (Coherent, None)])
def test_a_layer_is_gone_before_the_next_one_is_made(living, kind, travel):
    trace = recording(40)
    plan = placed(plan_for(trace, "concurrent").model_copy(update={"travel": travel}))
    twice(kind(context_of(plan, trace, model=MODEL), plan))
    (counts,) = living.values()
    assert counts == [0] * (2 * LAYERS), "also between two passes, where the layers of another plan may come"


def test_of_each_of_two_models_a_layer_is_gone_before_its_next_one_is_made(living):
    trace, other = recording(40), recording_b()
    plan = placed(beside(plan_for(trace, "concurrent"), plan_for(other, "concurrent", model=OTHER)))
    twice(Colocated(context_of(plan, trace, other, model=MODEL, model_b=OTHER), plan))
    assert list(living.values()) == [[0] * (2 * LAYERS)] * 2


def test_the_experts_of_a_step_are_made_one_by_one(monkeypatch):
    """A step brings its weights anew from the second time on: beside them there is room for one expert."""
    asked, experts = [], Weights.experts

    def counting(weights: Weights, layer: int, which) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(len(which))
        return experts(weights, layer, which)

    monkeypatch.setattr(Weights, "experts", counting)
    alone = Placement(experts=8, experts_of_gpu=((tuple(range(8)),),) * 2, model_layers=(1, 2))
    plan = step_plan_of(alone)
    trace = RoutingTrace("any", recording(60).experts[:, :2], 8)
    twice(StepExecutor(context_of(plan, trace, model=STEP_MODEL, step=STEP), plan))
    assert len(asked) == 2 * 2 * 2 * 8 and set(asked) == {1}
