"""A step of serving: its sizes, its settings and its roofline."""

import json
from dataclasses import replace

import numpy as np
import pytest

from engine.catalogue import cluster_presets, gpu
from engine.costs import Datasheet
from engine.formats import is_huggingface, read_model, read_sizes
from engine.serving import step as serving_step
from engine.serving.figures import memory_of
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import TransformerSizes, named_serving, of_lengths, usual_serving
from engine.serving.step import ServingStep, by_kind, load_of_step, recording_of_step, seconds_of
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.files import DEEPSEEK_V3, MIXTRAL
from tests.cases.refusals import refusal
from tests.serving.samples import DECODE, DEEPSEEK, DEEPSEEK_SIZES, PREFILL, QWEN, QWEN_SIZES
from tests.strategies import make_model


def test_a_decode_step_makes_one_token_of_each_sequence():
    assert DECODE.tokens == DECODE.head_rows == 64
    assert DECODE.keys == 2000 + 1001 / 2  # half-way through the output, the token itself included
    assert DECODE.longest == 3000
    assert DECODE.keys_within(128) == 128 and DECODE.keys_within(10_000) == DECODE.keys
    both = DECODE.model_copy(update={"overlap": "two-batch"})
    assert both.half() == DECODE.model_copy(update={"sequences": 32})


def test_a_prefill_step_takes_whole_prompts():
    assert PREFILL.tokens == 2 * 4096 and PREFILL.head_rows == 2
    keys = [position + 1 for position in range(PREFILL.context)]
    assert pytest.approx(np.mean(keys)) == PREFILL.keys
    for window in (1, 1000, 4096, 5000):
        assert pytest.approx(np.minimum(keys, window).mean()) == PREFILL.keys_within(window)
    assert PREFILL.longest == 4096  # later tokens are another step's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequences": 3, "overlap": "two-batch"}, "3 sequences on a GPU are odd"),
        ({"sequences": 0}, "step: sequences: Input should be greater than or equal to 1"),
        ({"phase": "both"}, "step: phase: Input should be 'prefill' or 'decode'"),
        ({"tensor_parallel": 2}, "step: tensor_parallel: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_step_is_refused_in_one_line(change, message):
    wrong = {"phase": "decode", "sequences": 64, "context": 2000} | change
    said = refusal(lambda: ServingStep.from_dict(wrong, "step"))
    assert message in said and "\n" not in said


def test_the_load_of_a_step_keeps_the_popularity_of_the_recording():
    model = make_model(3, 4, 2)
    recorded = ExpertLoad("recorded", np.array([[1.0, 2, 3, 4], [0, 0, 0, 10], [0, 0, 0, 0]]), model.moe_layers)
    load = load_of_step(recorded, DECODE, model, gpus=8).load
    assert load.sum(axis=1) == pytest.approx(np.full(3, 64 * 8 * 2))
    assert load[0] / load[0].sum() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert load[1] == pytest.approx([0, 0, 0, 1024])
    assert load[2] == pytest.approx(np.full(4, 256))  # nothing was recorded: balanced


@pytest.mark.parametrize("recorded", [10, 16, 50])
def test_a_routing_log_to_plan_for_has_the_tokens_of_the_step(recorded):
    model = make_model(2, 8, 2)
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((recorded, 2, 8)), axis=2)[:, :, :2].astype(np.int16)
    log = RoutingTrace("log", chosen, 8, source_rank=np.zeros(recorded, dtype=np.int32))
    step = ServingStep(phase="decode", sequences=4, context=10)
    trace = recording_of_step(log, step, model, gpus=4)
    assert trace.experts.shape == (16, 2, 2) and trace.name == "log, at 4 tokens per GPU"
    assert {row.tobytes() for row in trace.experts} <= {row.tobytes() for row in chosen}
    assert len({row.tobytes() for row in trace.experts}) == len({row.tobytes() for row in chosen[:16]})
    assert np.bincount(trace.rank_of_token(4)).tolist() == [4, 4, 4, 4]  # not all on the first GPU


def test_a_routing_log_counts_by_its_loads_and_a_step_too_large_for_tokens_is_planned_by_them(monkeypatch):
    model = make_model(1, 4, 1)
    log = RoutingTrace("log", np.array([[[0]], [[0]], [[3]]], dtype=np.int16), 4)
    monkeypatch.setattr(serving_step, "MOST_CHOICES", 2 * PREFILL.tokens - 1)
    for loads in (load_of_step(log, PREFILL, model, gpus=2), recording_of_step(log, PREFILL, model, gpus=2)):
        assert isinstance(loads, ExpertLoad)
        assert loads.load[0] / PREFILL.tokens == pytest.approx([4 / 3, 0, 0, 2 / 3])


LATENT = DEEPSEEK_V3 | {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}
GROUPED = MIXTRAL | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}


@pytest.fixture
def read(tmp_path):
    def of(config: dict) -> TransformerSizes:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return read_sizes(path)

    return of


def test_latent_attention_is_read_and_a_sparse_one(read, tmp_path):
    assert read(LATENT) == DEEPSEEK_SIZES
    (tmp_path / "ours.json").write_text(DEEPSEEK.to_json())
    assert is_huggingface(tmp_path / "config.json") and not is_huggingface(tmp_path / "ours.json")
    sizes = read(LATENT | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128})
    assert (sizes.sparse_keys, sizes.index_heads, sizes.index_size) == (2048, 64, 128)
    assert sizes.kv_numbers == DEEPSEEK_SIZES.kv_numbers + 128
    more = sizes.attention_weights(7168) - DEEPSEEK_SIZES.attention_weights(7168)
    assert more == 64 * 128 * 1536 + (128 + 64) * 7168  # queries of the index heads, their keys and their weights


def test_grouped_heads_are_read(read):
    sizes = read(GROUPED)
    assert (sizes.heads, sizes.kv_heads, sizes.head_size, sizes.value_size) == (32, 8, 128, 128)  # 4096 / 32
    assert sizes.dense_d_ff == 14336 and not sizes.latent and not sizes.tied_embeddings
    assert read(GROUPED | {"head_dim": 64}).head_size == 64
    assert read({**GROUPED, "num_key_value_heads": None}).kv_heads == 32


MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256}
"""Jamba has these; its layers are 4096 wide here."""
DELTA = {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
DELTA |= {"linear_conv_kernel_dim": 4, "full_attention_interval": 4, "mamba_ssm_dtype": "float32"}


@pytest.mark.parametrize(
    ("config", "attention", "name", "weights", "state"),
    [
        (
            MAMBA | {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4},
            *(4, "Mamba", 8192 * (16384 // 4 * 2 + 288 + 256 + 4096 + 4 + 16), 2 * 8192 * (16 + 3)),
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": (["mamba"] * 7 + ["attention"]) * 4, "mamba_n_groups": 1}
            | {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4},
            *(4, "Mamba-2", 4096 * (16768 + 8192) + 4 * 8448, 2 * (8192 * 128 + 3 * 8448)),
        ),
        (
            {"model_type": "nemotron_h", "layer_types": (["mamba"] * 7 + ["attention"]) * 4},  # sizes of transformers
            *(4, "Mamba-2", 4096 * (18560 + 8192) + 4 * 10240, 4 * 8192 * 128 + 2 * 3 * 10240),
        ),
        (
            DELTA | {"model_type": "qwen3_next"},
            *(8, "gated DeltaNet", 4096 * (12288 + 64 + 4096) + 4 * 8192, 4 * 4096 * 128 + 2 * 3 * 8192),
        ),
        (
            {"model_type": "lfm2_moe", "layer_types": (["conv"] * 3 + ["full_attention"]) * 8, "conv_L_cache": 3},
            *(8, "short convolution", 4 * 4096 * 4096 + 3 * 4096, 2 * 2 * 4096),
        ),
        (
            {"model_type": "minimax_text_01", "attn_type_list": ([0] * 7 + [1]) * 4},
            *(4, "lightning attention", 5 * 4096 * 4096, 4 * 32 * 128 * 128),
        ),
    ],
)
def test_hybrid_layers_keep_a_state_and_only_attention_keeps_keys_and_values(
    read, tmp_path, config, attention, name, weights, state
):
    sizes = read(GROUPED | config)
    (mixer,) = sizes.mixers
    assert (mixer.name, mixer.layers, mixer.weights, mixer.state_bytes) == (name, 32 - attention, weights, state)
    model = read_model(tmp_path / "config.json")
    assert model.attention_layers == attention
    per_token = 2 * 8 * 128 * 2
    assert model.context_bytes_per_token == attention * per_token
    step = ServingStep(phase="decode", sequences=2, context=8000, output=1)
    memory = memory_of(np.zeros(8), cluster_presets()["hgx-h100-8"].cluster, model, sizes, step)
    assert (memory.kv, memory.states) == (2 * 8001 * attention * per_token, 2 * (32 - attention) * state)
    assert memory.total == memory.others + memory.kv + memory.states and "states of sequences" in memory.in_words


def test_sliding_windows_are_read_where_layers_have_them(read):
    kinds = ["sliding_attention", "full_attention"] * 16
    sizes = read(GROUPED | {"sliding_window": 128, "layer_types": kinds})
    assert (sizes.window, sizes.windowed_layers) == (128, 16)
    assert sizes.kept_numbers(1000, 32) == 16 * (1000 + 128) * sizes.kv_numbers
    pattern = read(GROUPED | {"sliding_window": 128, "hybrid_layer_pattern": [0] + [1] * 31})
    assert pattern.windowed_layers == 31
    assert read(GROUPED | {"sliding_window": 4096}).windowed_layers == 32  # Mixtral has it everywhere
    assert read(GROUPED | {"sliding_window": 4096, "use_sliding_window": False}).windowed_layers == 0


PATTERN = {"sliding_window": 100, "layer_types": ["full_attention", "sliding_attention"] * 16}
GEMMA = PATTERN | {"head_dim": 64, "global_head_dim": 128, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
STEP = {"attention_type": "sliding_attention", "num_attention_heads": 48, "num_attention_groups": 4, "head_dim": 64}
INDEX = {"sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_topk_blocks": 16, "sparse_block_size": 128}
SPARSE = {"sparse_attention_config": INDEX | {"sparse_attention_freq": [0, 0] + [1] * 30}}
TRANSFORMERS = {"index_n_heads": 4, "index_head_dim": 128, "index_topk_blocks": 16, "index_block_size": 128}


@pytest.mark.parametrize(
    ("config", "weights", "kept"),
    [
        # Queries, keys and output of the layers without a window; then those with one, with values. Kept: of 1000 tokens.
        (GEMMA, 16 * (32 * 128 * 2 + 2 * 128) + 16 * (32 * 64 * 2 + 2 * 8 * 64), 16 * (1000 * 512 + 100 * 1024)),
        (
            GEMMA | {"attention_k_eq_v": False},
            *(16 * (32 * 128 * 2 + 16 * 128) + 16 * (32 * 64 * 2 + 16 * 64), 16 * (1000 * 2048 + 100 * 1024)),
        ),
        (
            PATTERN | {"attention_other_setting": STEP, "use_head_wise_attn_gate": True},
            *(16 * (32 * 128 * 2 + 16 * 128 + 32) + 16 * (48 * 64 * 2 + 8 * 64 + 48), 16 * (1000 * 2048 + 100 * 512)),
        ),
        (
            PATTERN | {"per_layer_config": {f"{layer:02}": {"num_attention_heads": 64} for layer in range(1, 32, 2)}},
            *(16 * (32 * 128 * 2 + 16 * 128) + 16 * (64 * 128 * 2 + 16 * 128), 16 * 1100 * 2048),
        ),
        (SPARSE, 32 * (32 * 128 * 2 + 16 * 128) + 30 * 5 * 128, 1000 * (32 * 2048 + 30 * 128)),
        (
            TRANSFORMERS | {"layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"] * 30},
            *(32 * (32 * 128 * 2 + 16 * 128) + 30 * 5 * 128, 1000 * (32 * 2048 + 30 * 128)),
        ),
    ],
)
def test_layers_with_heads_or_an_index_of_their_own_count_as_they_are(read, tmp_path, config, weights, kept):
    sizes = read(GROUPED | config)
    model = read_model(tmp_path / "config.json")
    assert sizes.weights(model)[0] == 4096 * weights
    assert sizes.kept_numbers(1000, 32) == kept
    operators = timed(model, sizes, DECODE)
    core = [operator.layers for name, operator in operators.items() if "attention" in name]
    assert sum(core) == 32 and operators.get("index", operators["embedding"]).layers == (30 if sizes.sparse_keys else 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LATENT | {"index_topk": 2048}, "sparse attention (DSA) needs sparse_keys, index_heads and index_size"),
        (GROUPED | {"ssm_state_size": 128}, "ssm_state_size: belongs to layers that no key lists (mamba)"),
        (GROUPED | {"attn_layer_period": 8}, "Mamba's state size is missing; none of ssm_state_size, mamba_d_state is there"),
        (GROUPED | {"per_layer_config": [{}]}, "per_layer_config: must be an object of objects"),
        (GROUPED | {"num_hidden_layers": 10**9}, "1000000000 layers are too many"),
        (GROUPED | MAMBA | {"attn_layer_period": 8, "mamba_d_state": 10**9}, "config.json: further: Input should be less"),
        (GROUPED | {"index_topk": 2048}, "index_topk: is of sparse attention without latent queries"),
        (LATENT | PATTERN | {"num_hidden_layers": 32, "swa_num_attention_heads": 64}, "latent attention with other sizes"),
        (
            GROUPED | PATTERN | {"per_layer_config": {"1": {"head_dim": 64}}},
            "per_layer_config: differs among layers of one kind",
        ),
        ({**GROUPED, "vocab_size": None}, "config.json: vocabulary is missing; none of vocab_size is there"),
        (GROUPED | {"num_key_value_heads": 5}, "32 heads cannot share 5 key-value heads evenly"),
        ({"model_type": "llama", "hidden_size": 64}, "is not an MoE model"),
    ],
)
def test_what_cannot_be_used_is_named(read, config, message):
    said = refusal(lambda: read(config))
    assert "config.json" in said and message in said


def test_all_weights_together_are_what_the_models_are_named_for_and_the_cache_keeps_latents_or_keys_and_values():
    for model, sizes, billions in ((DEEPSEEK, DEEPSEEK_SIZES, 671), (QWEN, QWEN_SIZES, 30.5)):
        experts = len(model.moe_layers) * model.experts * 3 * model.d_model * model.d_ff
        assert (experts + sum(sizes.weights(model))) / 1e9 == pytest.approx(billions, rel=0.005)
    assert (DEEPSEEK_SIZES.kv_numbers, QWEN_SIZES.kv_numbers) == (576, 2 * 4 * 128)
    tied = QWEN_SIZES.model_copy(update={"tied_embeddings": True})
    assert QWEN_SIZES.weights(QWEN)[1] - tied.weights(QWEN)[1] == 151936 * 2048


H200 = gpu("H200")
IDEAL = Datasheet(compute_efficiency=1, memory_efficiency=1, launch=0)


def timed(model, sizes, step, datasheet=IDEAL):
    return {operator.name: operator for operator in RooflineOperators(model, sizes, H200, datasheet).operators(step)}


def test_decode_attention_reads_every_key_and_value_once_and_prefill_multiplies_half_the_square():
    step = DECODE.model_copy(update={"kv_dtype": "bf16"})
    # Layers, sequences, tokens, keys and values of 4 heads of 128, bf16.
    bytes_read = 48 * 64 * step.keys * 2 * 4 * 128 * 2
    assert timed(QWEN, QWEN_SIZES, step)["attention"].seconds == pytest.approx(bytes_read / H200.memory_bandwidth)
    halved = timed(QWEN, QWEN_SIZES, DECODE)["attention"].seconds
    assert halved == pytest.approx(bytes_read / 2 / H200.memory_bandwidth)
    flops = 48 * 2 * PREFILL.tokens * (PREFILL.context + 1) / 2 * 32 * (128 + 128)
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
    weights = 58 * 3 * 7168 * 2048 + 64 * 58 * (2 * 7168 + 3 * 2048)  # read once, and the tokens in and out
    assert operators["shared experts"].seconds == pytest.approx(weights / H200.memory_bandwidth)
    assert not {"shared experts", "dense FFN"} & set(timed(QWEN, QWEN_SIZES, DECODE))


def test_only_last_tokens_meet_the_vocabulary_and_kinds_add_up_to_the_whole():
    rows = {step.phase: timed(DEEPSEEK, DEEPSEEK_SIZES, step)["output head"].seconds for step in (DECODE, PREFILL)}
    assert rows["prefill"] < rows["decode"]
    assert rows["decode"] > 7168 * 129280 * 2 / H200.memory_bandwidth
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


@pytest.mark.parametrize(
    ("name", "phase", "context", "output"),
    [
        ("decode_in2000out100", "decode", 2000, 100),
        ("prefill_in1024", "prefill", 1024, 1000),
        ("ISL1024-OSL=512", None, 1024, 512),
        ("R1 input 300, output 20", None, 300, 20),
        ("alpha-code", None, 2000, 1000),
        ("min12 layout7, in8k out1.5k, in0", None, 2000, 1000),
        ("spin4out99999999", None, 2000, 1000),
    ],
)
def test_a_name_tells_the_tokens_in_and_out(name, phase, context, output):
    step = named_serving(name, phase)
    assert (step.context, step.output, step.phase) == (context, output, phase or "decode")
    assert step.model_copy(update={"context": 2000, "output": 1000}) == usual_serving(phase or "decode")
    told = of_lengths(step, "prefill")
    assert (told is None) == ((context, output) == (2000, 1000)), "a name that tells none leaves the usual ones"
    assert told is None or (told.context, told.output, told.phase, told.sequences) == (context, output, "prefill", 1)
