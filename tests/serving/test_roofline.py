"""Operators by the datasheet: what each computes and moves."""

from dataclasses import replace

import pytest

from engine.catalogue import gpu
from engine.costs import Datasheet
from engine.serving.roofline import RooflineOperators
from engine.serving.step import by_kind, seconds_of
from tests.serving.samples import DECODE, DEEPSEEK, DEEPSEEK_SIZES, PREFILL, QWEN, QWEN_SIZES

H200 = gpu("H200")
IDEAL = Datasheet(compute_efficiency=1, memory_efficiency=1, launch=0)


def timed(model, sizes, step, datasheet=IDEAL):
    return {operator.name: operator for operator in RooflineOperators(model, sizes, H200, datasheet).operators(step)}


def test_decode_attention_reads_every_key_and_value_once():
    step = DECODE.model_copy(update={"kv_dtype": "bf16"})
    bytes_read = (
        48 * 64 * step.keys * 2 * 4 * 128 * 2
    )  # layers, sequences, tokens, keys and values of 4 heads of 128, bf16
    assert timed(QWEN, QWEN_SIZES, step)["attention"].seconds == pytest.approx(bytes_read / H200.memory_bandwidth)
    halved = timed(QWEN, QWEN_SIZES, DECODE)["attention"].seconds
    assert halved == pytest.approx(bytes_read / 2 / H200.memory_bandwidth)


def test_prefill_attention_multiplies_half_the_square():
    tokens, context, heads = PREFILL.tokens, PREFILL.context, 32
    flops = 48 * 2 * tokens * (context + 1) / 2 * heads * (128 + 128)
    assert timed(QWEN, QWEN_SIZES, PREFILL)["attention"].seconds == pytest.approx(flops / H200.flops_fp16)


def test_latent_attention_decodes_with_absorbed_projections():
    decode, prefill = timed(DEEPSEEK, DEEPSEEK_SIZES, DECODE), timed(DEEPSEEK, DEEPSEEK_SIZES, PREFILL)
    assert "absorbed up-projections" in decode and "key-value up-projection" not in decode
    assert "key-value up-projection" in prefill and "absorbed up-projections" not in prefill
    # Queries and outputs meet the latent of 512, queries its rotary 64 as well.
    flops = 61 * 2 * 64 * DECODE.keys * 128 * (512 + 64 + 512)
    assert decode["attention"].seconds == pytest.approx(flops / H200.flops_fp16)


def test_sparse_attention_reads_what_it_attends_to_and_every_index_key():
    sparse = DEEPSEEK_SIZES.model_copy(update={"sparse_keys": 512, "index_heads": 1, "index_size": 128})
    full, chosen = (timed(DEEPSEEK, sizes, DECODE) for sizes in (DEEPSEEK_SIZES, sparse))
    assert chosen["attention"].seconds / full["attention"].seconds == pytest.approx(512 / DECODE.keys)
    assert chosen["index"].seconds == pytest.approx(61 * 64 * DECODE.keys * 128 / H200.memory_bandwidth)
    short = DECODE.model_copy(update={"context": 100, "output": 1})
    assert timed(DEEPSEEK, sparse, short)["attention"] == timed(DEEPSEEK, DEEPSEEK_SIZES, short)["attention"]


def test_layers_with_a_window_see_no_further():
    windowed = QWEN_SIZES.model_copy(update={"window": 128, "windowed_layers": 24})
    full, split = timed(QWEN, QWEN_SIZES, DECODE), timed(QWEN, windowed, DECODE)
    assert (split["attention"].layers, split["attention in windows"].layers) == (24, 24)
    assert split["attention"].seconds == pytest.approx(full["attention"].seconds / 2)
    assert split["attention in windows"].seconds / split["attention"].seconds == pytest.approx(128 / DECODE.keys)


def test_every_layer_is_counted_where_it_is():
    operators = timed(DEEPSEEK, DEEPSEEK_SIZES, DECODE)
    assert operators["attention"].layers == operators["output projection"].layers == 61
    assert operators["shared experts"].layers == 58 and operators["dense FFN"].layers == 3
    weights = 58 * 3 * 7168 * 2048 + 64 * 58 * (2 * 7168 + 3 * 2048)  # read once, and what goes in and comes out
    assert operators["shared experts"].seconds == pytest.approx(weights / H200.memory_bandwidth)
    assert "shared experts" not in timed(QWEN, QWEN_SIZES, DECODE) and "dense FFN" not in timed(
        QWEN, QWEN_SIZES, DECODE
    )


def test_only_last_tokens_meet_the_vocabulary():
    rows = {step.phase: timed(DEEPSEEK, DEEPSEEK_SIZES, step)["output head"].seconds for step in (DECODE, PREFILL)}
    assert rows["prefill"] < rows["decode"]
    assert rows["decode"] > 7168 * 129280 * 2 / H200.memory_bandwidth


def test_kinds_add_up_to_the_whole():
    operators = RooflineOperators(DEEPSEEK, DEEPSEEK_SIZES, H200).operators(DECODE)
    assert sum(by_kind(operators).values()) == pytest.approx(seconds_of(operators))
    assert set(by_kind(operators)) == {"embedding", "norm", "attention", "shared expert", "dense FFN", "head"}
    assert {operator.origin for operator in operators} == {"datasheet"}


def test_an_assumed_launch_is_paid_for_every_kernel_of_every_layer():
    without = RooflineOperators(DEEPSEEK, DEEPSEEK_SIZES, H200, replace(Datasheet(), launch=0)).operators(DECODE)
    with_it = RooflineOperators(DEEPSEEK, DEEPSEEK_SIZES, H200, Datasheet(launch=1e-5)).operators(DECODE)
    kernels = {"shared experts": 2, "dense FFN": 2}
    for slow, fast in zip(with_it, without, strict=True):
        assert slow.seconds - fast.seconds == pytest.approx(1e-5 * slow.layers * kernels.get(slow.name, 1))
