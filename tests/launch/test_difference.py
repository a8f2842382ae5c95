"""How far a plan's numbers may be from the unplanned ones: as far as rounding takes those themselves, whatever the depth."""

import numpy as np
import pytest
import torch

from engine.launch.rank import layers
from engine.launch.rank.difference import ALWAYS, Difference, allowed, coarsest, in_words, relative, worst
from engine.launch.rank.instructions import RankInstructions, Tokens
from engine.launch.rank.layer import expert_ffns
from engine.launch.rank.layers import Layers
from engine.model import MoEModel
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.result import Provenance
from tests.launch import lockstep

LAYERS, EXPERTS, RANKS = 48, 8, 4
DEEP = MoEModel(
    name="deep", layers=LAYERS, experts=EXPERTS, experts_per_token=2, d_model=64, d_ff=96, ffn_matrices=3, dtype="bf16"
)
PLAN = Plan(
    name="plan",
    placement=Placement.from_gpu_of_expert(
        np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS) % RANKS, RANKS, range(LAYERS)
    ),
    send_order=SendOrder(mode="concurrent"),
    provenance=Provenance(optimiser="test"),
)


@pytest.fixture(scope="module")
def ranks() -> list[Layers]:
    """After a pass of a plan that is right."""
    rng = np.random.default_rng(3)
    tokens = Tokens(rng.integers(0, EXPERTS, (96, LAYERS, 2)).astype(np.int16), np.arange(96, dtype=np.int32) % RANKS)
    ranks = lockstep.ranks_of(RankInstructions(plans=(PLAN,), model=DEEP, ranks=RANKS, backend="gloo"), tokens)
    lockstep.run(ranks)
    return ranks


def output_of(ranks: list[Layers]) -> torch.Tensor:
    """[token, d_model], of all ranks."""
    output = ranks[0].first_tokens()
    for number, rank in enumerate(ranks):
        output[rank.held(LAYERS)] = rank.x
        assert len(rank.x), number
    return output


def test_a_deep_model_in_16_bits_is_off_by_far_and_right(ranks, monkeypatch):
    """Here with the kernel of another machine, which rounds less often: on one machine both computations round alike."""

    def in_32_bits(rows, counts, inward, outward, gated, ends):
        return expert_ffns(rows.float(), counts, inward.float(), outward.float(), gated, ends).to(rows.dtype)

    monkeypatch.setattr(layers, "expert_ffns", in_32_bits)
    lockstep.run(ranks)
    with torch.inference_mode():
        output = output_of(ranks)
        difference = ranks[0].comparison()(output)
        assert relative(output, ranks[0].unplanned()) > 5 * ALWAYS["bf16"], "a fixed bound would call it wrong"
    assert difference.share < 0.7, difference


@pytest.mark.parametrize("layer", [0, 20, LAYERS - 1])
def test_a_mistake_in_one_layer_of_one_rank_is_seen_among_all_that_rounding(ranks, monkeypatch, layer):
    """The rank's rows go back in the wrong order."""
    real = Layers.ffn

    def turned(self: Layers, number: int) -> None:
        real(self, number)
        if number == layer and self.context.rank == 1:
            self.result = self.result.flip(0)

    monkeypatch.setattr(Layers, "ffn", turned)
    lockstep.run(ranks)
    with torch.inference_mode():
        assert ranks[0].comparison()(output_of(ranks)).share > 1


def test_of_what_is_allowed():
    assert allowed("fp32") == 1e-4 and allowed("bf16", 0.03) == pytest.approx(0.09) and allowed("bf16", 0.0) == 1e-2
    travelling = PLAN.model_copy(update={"travel": Travel(unit="gpu", dispatch="fp8", combine="fp16")})
    assert coarsest(DEEP, PLAN) == "bf16" and coarsest(DEEP, travelling) == "fp8"
    assert worst([Difference(0.5, 1.0), Difference(1e-3, 1e-4), Difference(2.0, 1.0)]) == (1e-3, 1e-4)
    no_number = Difference(float("nan"), 1.0)
    assert no_number.share == float("inf") and worst([Difference(5.0, 1.0), no_number]) is no_number
    assert relative(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])) == 0.25
    assert relative(torch.zeros(2), torch.zeros(2)) == 0 and relative(torch.ones(2), torch.zeros(2)) == float("inf")
    assert relative(torch.tensor([float("nan"), 0.0]), torch.ones(2)) == float("inf")
    assert in_words("fp32", "fp8", "the largest") == ", to a relative tolerance of 0.05 of the largest"
    assert in_words("bf16", "bf16", "it").endswith(
        "3 times as far from that as an unplanned one in bf16 is, or 0.01 of it"
    )
