"""Fused expert kernels: balanced rows are met, uneven loads add up, and the power-law rows agree."""

import numpy as np
import pytest

from engine.catalogue import gpu, model_presets
from engine.compare.trust.collectives import skew_errors
from engine.costs import AlphaBeta, CostProfile, Datasheet, Line
from engine.costs.fused_experts import FusedExperts, KernelTable, kernel_rows, kernel_table
from engine.costs.scaled import Scaled
from engine.errors import InputError
from tests.costs.silicon import needs_tables
from tests.serving.samples import DEEPSEEK, QWEN, h200

TABLE = KernelTable(
    experts=np.array([4.0, 16.0]),
    tokens=(np.array([2.0, 8.0]), np.array([2.0, 8.0])),
    share=(np.array([1e-3, 2e-3]), np.array([4e-3, 8e-3])),
)


def test_sizes_between_measured_ones_are_interpolated_in_logarithms():
    assert TABLE.seconds(np.array([2.0, 4.0, 8.0]), 4) == pytest.approx([1e-3, 2**0.5 * 1e-3, 2e-3])
    assert TABLE.seconds(np.array([2.0, 8.0]), 8) == pytest.approx([2e-3, 4e-3])  # half-way between 4 and 16


def test_outside_the_measured_sizes():
    assert TABLE.seconds(np.array([0.0, 0.5]), 4) == pytest.approx([0, 1e-3])  # weights are read all the same
    assert TABLE.seconds(np.array([80.0]), 4) == pytest.approx([2e-2])  # at the last throughput
    assert TABLE.seconds(np.array([2.0]), 1) == TABLE.seconds(np.array([2.0]), 4)


@needs_tables
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("model", [DEEPSEEK, QWEN], ids=lambda model: model.name)
def test_balanced_rows_are_met(model, phase):
    rows = kernel_rows("H200", model, phase)
    balanced = rows[rows.distribution.isin(("balanced", "uniform"))]
    assert len(balanced) > 40
    table = kernel_table("H200", model, phase)
    ours = np.array([row.experts_held * table.seconds(row.tokens, row.experts_held) for row in balanced.itertuples()])
    errors = ours / balanced.seconds.to_numpy() - 1
    # Off only where more tokens were measured to take less time.
    assert errors.min() > -1e-9 and np.mean(errors) < 0.02


@needs_tables
def test_wide_kernels_go_before_the_usual_ones():
    """Balanced, 64 tokens on each of 32 H200: aiconfigurator's command line takes 7.07 ms for 61 layers."""
    seconds = 8 * kernel_table("H200", DEEPSEEK, "decode").seconds(np.array(64.0), 8)
    assert 61 * seconds == pytest.approx(7.072e-3, rel=2e-3)


@needs_tables
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_power_law_rows_agree_with_the_sum_over_experts(phase):
    errors = skew_errors("H200", DEEPSEEK, phase)
    mine = errors[errors.held.between(4, 32)].groupby("exponent").error
    assert set(mine.groups) == {0.6, 0.8, 1.01, 1.02, 1.2}
    assert mine.apply(lambda error: error.abs().mean()).max() < 0.25
    assert mine.mean().abs().max() < 0.1


@needs_tables
def test_it_stands_in_for_the_experts_alone():
    cost, card, tokens = FusedExperts(Datasheet(), "decode", 8.0), gpu("H200"), np.array([0.0, 64.0, 128.0])
    assert cost.expert_ffn(card, tokens, DEEPSEEK)[1] < Datasheet().expert_ffn(card, tokens, DEEPSEEK)[1]
    assert cost.gate(card, tokens, DEEPSEEK) == pytest.approx(Datasheet().gate(card, tokens, DEEPSEEK))
    assert cost.aggregate(card, tokens, DEEPSEEK) == pytest.approx(Datasheet().aggregate(card, tokens, DEEPSEEK))
    cluster = h200(1)
    assert cost.all_to_all(cluster, 1e6) == Datasheet().all_to_all(cluster, 1e6)
    assert cost.source.startswith("experts: fused kernels of SGLang (decode), measured") and "datasheet" in cost.source
    assert cost.digest != FusedExperts(Datasheet(), "decode", 9.0).digest


@needs_tables
def test_gpus_that_only_the_package_has_have_their_kernels():
    tokens = np.array([16.0])
    here, faster = (kernel_table(kind, QWEN, "decode").seconds(tokens, 16)[0] for kind in ("H200", "GB200"))
    assert here / 3 < faster < here


@needs_tables
def test_what_was_not_measured_is_named():
    assert kernel_table("V100-32", DEEPSEEK, "decode") is None
    alpha = model_presets()["tiny-moe-alpha"].model
    assert kernel_table("H200", alpha, "decode") is None
    with pytest.raises(InputError, match="no measured fused kernels for tiny-moe-alpha in bf16 on H200"):
        FusedExperts(Datasheet(), "decode", 2.0).expert_ffn(gpu("H200"), np.ones(1), alpha)


def test_all_else_is_as_the_source_prices_it():
    tokens = np.array([1.0, 64.0])
    lines = {kind: {"H200": Line(alpha=alpha, beta=1e-15)} for kind, alpha in (("gemm", 1e-6), ("gate", 5e-6))}
    profile = CostProfile(name="p", origin="a test", ranks=8, **lines)
    for rest in (AlphaBeta(profile), Scaled(Datasheet(), tokens=2.0)):
        cost, card = FusedExperts(rest, "decode", 8.0), gpu("H200")
        assert cost.gate(card, tokens, DEEPSEEK) == pytest.approx(rest.gate(card, tokens, DEEPSEEK))
        assert cost.aggregate(card, tokens, DEEPSEEK) == pytest.approx(rest.aggregate(card, tokens, DEEPSEEK))
        assert cost.attention(card, tokens, 9, DEEPSEEK) == pytest.approx(rest.attention(card, tokens, 9, DEEPSEEK))
