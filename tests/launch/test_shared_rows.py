"""Rows that serve several experts: any placement, nodes and formats compute what one process computes, rank by rank."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.launch.rank.difference import allowed, coarsest, relative
from engine.launch.rank.exchange import Exchange
from engine.launch.rank.forward import kind_of_layers
from engine.launch.rank.hops import Legs
from engine.launch.rank.instructions import RankInstructions, Tiers, Tokens
from engine.launch.rank.layers import Layers
from engine.launch.rank.shared_rows import SharedRows
from engine.plan import Travel
from tests.cases.examples import examples
from tests.launch import lockstep
from tests.launch.test_layer import launches, unplanned

pytestmark = pytest.mark.slow

FORMATS = (None, "bf16", "fp16", "fp8")


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> Iterator[None]:
    """A process group of this process, in which nothing is received."""
    monkeypatch.setattr(Exchange, "expect", lambda way, incoming: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@st.composite
def travelling(draw) -> tuple[RankInstructions, Tokens]:
    instructions, tokens = draw(launches())
    (plan,), ranks = instructions.plans, instructions.ranks
    travel = Travel(unit=draw(st.sampled_from(("copies", "gpu", "node"))), dispatch=draw(st.sampled_from(FORMATS)))
    travel = travel.model_copy(update={"combine": draw(st.sampled_from(FORMATS))})
    node = tuple(sorted(draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))))
    tiers = Tiers(node=node, port=(1e6,) * ranks, link=(5e6,) * ranks)
    return instructions.model_copy(
        update={"plans": (plan.model_copy(update={"travel": travel}),), "tiers": tiers}
    ), tokens


def run(launch: tuple[RankInstructions, Tokens]) -> tuple[list[Layers], torch.Tensor]:
    """All ranks after a pass, and the output of all tokens."""
    (plan,), source = launch[0].plans, launch[1].source
    ranks = lockstep.ranks_of(*launch, kind_of_layers(plan), hops=plan.travel.unit == "node")
    lockstep.run(ranks)
    output = torch.empty((len(source), ranks[0].model.d_model))
    for rank, own in enumerate(ranks):
        output[source == rank] = own.x
    return ranks, output


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(travelling(), st.sampled_from((1, 2, 7)))
def test_any_travel_computes_what_one_process_computes(launch, slices):
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(Legs, "slices", lambda *_: slices)
        ranks, output = run(launch)
        wanted = ranks[0].unplanned()
    if not wanted.numel() or not wanted.abs().max():
        return
    # A last bit may be a whole step of a coarse format, and then shows in all of its token; a token, a weight or an expert that
    # is wrong shows far above that.
    assert relative(output, wanted) <= allowed(coarsest(launch[0].model, launch[0].plans[0]))
    moved = ((output - wanted).abs() / wanted.abs().max() > 1e-5).any(dim=1)
    assert moved.sum() <= 1 + 0.2 * len(moved)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(travelling())
def test_in_the_models_own_format_rows_change_nothing(launch):
    instructions, tokens = launch
    (plan,) = instructions.plans
    plan = plan.model_copy(update={"travel": Travel(unit=plan.travel.unit, dispatch="fp32", combine="fp32")})
    instructions = instructions.model_copy(update={"plans": (plan,)})
    _, output = run((instructions, tokens))
    torch.testing.assert_close(output, unplanned(instructions, tokens), rtol=1e-5, atol=1e-5)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(travelling())
def test_a_lost_weight_or_a_wrong_expert_is_noticed(launch):
    """The check has to see what is wrong whatever the format: here one rank's experts are paid half."""
    instructions, tokens = launch
    if instructions.plans[0].travel.unit == "copies" or not (tokens.experts >= 0).any():
        return
    real = SharedRows.ffn

    def half(self: SharedRows, layer: int) -> None:
        real(self, layer)
        self.result = self.wires["combine"].pack(0.5 * self.wires["combine"].unpack(self.result))

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(SharedRows, "ffn", half)
        ranks, output = run(launch)
        rounding = allowed(coarsest(instructions.model, instructions.plans[0]))
        assert relative(output, ranks[0].unplanned()) > rounding / 2
