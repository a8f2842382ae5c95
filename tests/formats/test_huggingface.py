"""Models from Hugging Face configs and from our own JSON."""

import pytest

from engine.formats import read_cluster, read_model, read_plan, read_sizes
from tests.cases.files import DEEPSEEK_V3, GPT_OSS, LLAMA_4, MIXTRAL, QWEN2_MOE, refused, saver

written = saver("config.json")
OLMOE = {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
OLMOE |= {"num_experts": 64, "num_experts_per_tok": 8, "torch_dtype": "float32"}
PERIOD = {"num_hidden_layers": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
SPARSE = {"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}
NAMED = {"num_experts_per_tok": [2] * 32, "_name_or_path": "mistralai/Mixtral-8x7B"}
HYBRID = {"num_hidden_layers": 4, "hybrid_override_pattern": "ME*E", "mlp_hidden_act": "relu2"}
TWO_LAYERS = MIXTRAL | {"num_hidden_layers": 2}
PARAMS = {"dim": 6144, "n_layers": 56, "head_dim": 128, "hidden_dim": 16384, "n_heads": 48, "n_kv_heads": 8}
PARAMS |= {"vocab_size": 32768, "moe": {"num_experts_per_tok": 2, "num_experts": 8}}
MISTRAL_LARGE = {"dim": 7168, "n_layers": 61, "n_heads": 128, "hidden_dim": 16384, "q_lora_rank": 1536, "kv_lora_rank": 512}
MISTRAL_LARGE |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MISTRAL_LARGE |= {"moe": {"num_experts": 128, "num_experts_per_tok": 4, "expert_hidden_dim": 4096, "first_k_dense_replace": 3}}
MISTRAL_LARGE["moe"] |= {"num_shared_experts": 1, "route_every_n": 1, "num_expert_groups": 1, "num_expert_groups_per_tok": 1}
REFERENCE = {"dim": 7168, "n_layers": 61, "n_dense_layers": 3, "n_heads": 128, "inter_dim": 18432, "moe_inter_dim": 2048}
REFERENCE |= {"n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 8, "dtype": "fp8"}
REFERENCE |= {"n_expert_groups": 8, "n_limited_groups": 4}
OF_MIXTRAL = {"name": "mixtral", "layers": 32, "experts": 8, "experts_per_token": 2, "d_model": 4096, "d_ff": 14336}
OF_MIXTRAL |= {"dense_layers": (), "shared_experts": 0, "dtype": "bf16", "ffn_matrices": 3}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MIXTRAL, OF_MIXTRAL),
        (DEEPSEEK_V3, {"experts": 256, "d_ff": 2048, "dense_layers": (0, 1, 2), "shared_experts": 1, "dtype": "fp8"}),
        (QWEN2_MOE, {"experts": 60, "d_ff": 1408, "shared_experts": 4, "dense_layers": ()}),
        (GPT_OSS, {"experts": 128, "experts_per_token": 4, "d_ff": 2880, "dtype": "bf16"}),
        (OLMOE, {"experts": 64, "dtype": "fp32"}),
        (LLAMA_4, {"experts": 16, "dense_layers": (0, 2), "shared_experts": 1, "dtype": "fp16", "d_model": 5120}),
        ({**QWEN2_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, {"dense_layers": (0, 1, *range(2, 24, 2))}),
        (DEEPSEEK_V3 | SPARSE, {"dense_layers": (0, 1, 3, 5)}),
        ({**MIXTRAL, "num_hidden_layers": 3, "moe_layer_freq": [0, 1, 1, 1]}, {"dense_layers": (0,)}),
        ({**MIXTRAL, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}, {"dense_layers": (0,)}),
        (MIXTRAL | PERIOD, {"dense_layers": (0, 2)}),
        ({**MIXTRAL, "num_hidden_layers": 4, "moe_layers_enum": "2,3"}, {"dense_layers": (0, 1)}),
        ({**MIXTRAL, "num_hidden_layers": 4, "moe_layers_enum": "[ 2, 3 ]"}, {"dense_layers": (0, 1)}),
        ({**MIXTRAL, "num_hidden_layers": 4, "moe_layers_enum": [3, 1]}, {"dense_layers": (0, 2)}),
        ({**MIXTRAL, "num_hidden_layers": 4, "is_moe_layer": [False, True, True, False]}, {"dense_layers": (0, 3)}),
        ({**MIXTRAL, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1}, {"attention_layers": 1}),
        ({**MIXTRAL, "num_hidden_layers": 3, "layer_types": ["mamba", "conv", "attention"]}, {"attention_layers": 1}),
        (
            MIXTRAL | {"moe_latent_size": 1024},
            {"expert_width": 1024, "row_width": 1024, "numbers_per_expert": 3 * 1024 * 14336},
        ),
        ({**MIXTRAL, "routed_expert_hidden_size": 4096}, {"expert_width": None, "bytes_per_token": 8192}),
        (MIXTRAL | {"n_shared_experts": 1, "shared_intermediate_size": 28672}, {"shared_experts": 2, "shared_d_ff": None}),
        (MIXTRAL | {"n_shared_experts": 1, "share_expert_dim": 1000}, {"shared_experts": 1, "shared_d_ff": 1000}),
        (MIXTRAL | {"zero_expert_num": 4}, {"experts": 8, "zero_experts": 4}),
        (GPT_OSS, {"expert_bits": 4.25, "expert_biases": 3 * 2880}),
        (MIXTRAL | HYBRID, {"layers": 4, "dense_layers": (0, 2), "ffn_matrices": 2}),
        (MIXTRAL | NAMED, {"experts_per_token": 2, "name": "Mixtral-8x7B"}),
        (PARAMS, {"layers": 56, "experts": 8, "d_model": 6144, "d_ff": 16384, "kv_numbers": 2048, "expert_bits": None}),
        (PARAMS | {"quantization": {"qformat_weight": "nvfp4"}}, {"expert_bits": 4.5, "attention_dtype": "bf16"}),
        (MISTRAL_LARGE, {"experts": 128, "d_ff": 4096, "dense_layers": (0, 1, 2), "shared_experts": 1, "kv_numbers": 576}),
        (REFERENCE, {"experts": 256, "dense_layers": (0, 1, 2), "d_ff": 2048, "dtype": "fp8", "expert_groups": 8}),
        *(
            (MIXTRAL | {"num_hidden_layers": 4} | rule, {"dense_layers": (0,)})
            for rule in (
                {"moe_layers_enum": "1-3"},
                {"moe_layers": ["1", "2", "3"]},
                {"moe_layers": [], "first_k_dense_replace": 1},
                {"moe_layer_freq": "([0]*1+[1]*3)"},
                {"moe_layer_freq": "[0, 1, 1, 1]"},
                {"is_moe_layer": {"0": False, "1": True, "2": True, "3": True}},
                {"mlp_only_layers": "0"},
                {"moe_layer_start_index": [1]},
                {"moe_layer_num_skipped": 1},
            )
        ),
        ({**MIXTRAL, "moe_ffn_hidden_size": 512}, {"d_ff": 512}),
        (MIXTRAL | {"mamba_d_state": 16}, {"kv_numbers": None}),  # which layers have attention is not said
        (MIXTRAL | {"gated_linear_unit": False}, {"ffn_matrices": 2}),
        *(
            (
                {"model_type": "outer", "hidden_size": 8, name: {"model_type": "inner", "text_config": MIXTRAL}},
                OF_MIXTRAL | {"name": "outer"},
            )
            for name in ("thinker_config", "language_model")
        ),
        (
            {"model_type": "o", "hidden_size": 8, "talker_config": {"text_config": OLMOE}, "llm_config": MIXTRAL},
            {"experts": 8, "d_model": 4096},
        ),
    ],
)
def test_families(tmp_path, config, expected):
    model = read_model(written(tmp_path, config))
    assert {field: getattr(model, field) for field in expected} == expected


FP8_GROUP = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}
INT4_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}
NVFP4_GROUP = {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
HUMMING = {"quant_method": "humming", "b_dtype": "uint2", "bs_dtype": "bfloat16", "weight_scale_group_size": 128}
QUARK = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}


@pytest.mark.parametrize(
    ("quantisation", "dtype", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", None),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, "fp8", 9.0),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp8", 4.5),
        ({"quant_algo": "W4A16_NVFP4"}, "bf16", 4.5),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"layers.0.mlp.experts": {"quant_algo": "MXFP8"}}},
            "bf16",
            12.125,
        ),
        (COMPRESSED | {"format": "float-quantized", "config_groups": {"group_0": FP8_GROUP}}, "fp8", None),
        (COMPRESSED | {"config_groups": {"group_0": INT4_GROUP}}, "bf16", 4.5),
        (COMPRESSED | {"config_groups": {"group_0": INT4_GROUP}, "ignore": ["re:.*mlp.experts.*"]}, "bf16", None),
        (COMPRESSED | {"config_groups": {"0": NVFP4_GROUP}}, "bf16", 4.5),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "bf16", 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "bf16", 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "dynamic": {"-:.*experts.*": {}}}, "bf16", None),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "dynamic": {"+:.*experts": {"bits": 8}}},
            "bf16",
            8.25,
        ),
        (AUTO_ROUND | {"extra_config": {".*experts.*": {"bits": 16}}}, "bf16", None),
        (AUTO_ROUND | {"extra_config": {r".*\.down_proj": {"bits": 8}}}, "bf16", (2 * 4 + 8) / 3 + 16 / 128),
        ({"bits": 4, "group_size": 64, "mode": "affine"}, "bf16", 4.5),
        (COMPRESSED | {"quantization_config": {"config_groups": {"group_0": INT4_GROUP}}}, "bf16", 4.5),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}, "sparsity_config": {"format": "dense"}}, "bf16", None),
        (HUMMING, "bf16", 2.125),
        (HUMMING | {"has_zero_point": True}, "bf16", 2 + 18 / 128),
        (HUMMING | {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "weight_scale_group_size": 32}, "bf16", 4.25),
        (HUMMING | {"a_dtype": "float8e4m3"}, "fp8", 2.125),
        (HUMMING | {"ignore": [r"re:.*experts.*"]}, "bf16", None),
        ({"quant_method": "w4afp8"}, "fp8", 4.125),
        ({"quant_method": "quark", "layer_quant_config": {"*experts*": QUARK}}, "bf16", 4.25),
        ({"quant_method": "mxfp4"}, "bf16", 4.25),
        ({"quant_method": "quark", "global_quant_config": QUARK, "exclude": ["lm_head"]}, "bf16", 4.25),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bf16", 4.5),
        ({"quant_method": "int8"}, "bf16", 8),
        ({"quant_method": "fp8", "weight_block_size": [[1], "x"]}, "fp8", None),
    ],
)
def test_number_formats_in_every_spelling(tmp_path, quantisation, dtype, bits):
    model = read_model(written(tmp_path, TWO_LAYERS | {"quantization_config": quantisation}))
    assert (model.dtype, model.expert_bits) == (dtype, bits)
    assert model.bytes_per_expert == 3 * 4096 * 14336 * (bits or {"bf16": 16, "fp8": 8}[dtype]) / 8
    nested = {"model_type": "outer", "text_config": TWO_LAYERS, "quantization_config": quantisation}
    assert read_model(written(tmp_path, nested)).expert_bits == bits


def test_each_kind_of_matrix_has_the_format_that_the_lists_of_modules_give_it(tmp_path):
    left_out = ["lm_head", "model.layers.0*", "re:.*self_attn.*", "model.layers.1.mlp.shared_experts", "gate"]
    groups = {"config_groups": {"group_0": NVFP4_GROUP | {"targets": ["Linear"]}}, "ignore": left_out}
    config = TWO_LAYERS | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_shared_experts": 1, "vocab_size": 1000}
    config |= {"num_attention_heads": 32, "quantization_config": COMPRESSED | groups}
    path = written(tmp_path, config)
    model, sizes = read_model(path), read_sizes(path)
    assert model.expert_bits == 4.5
    assert (sizes.attention_bits, sizes.shared_bits, sizes.dense_bits) == (None, (16 + 4.5) / 2, None)
    inside = 3 * 4 * 4096 * 4096 * 2 + 3 * 4096 * 14336 * (2 + 2 + 4.5 / 8)
    assert sizes.bytes_inside(model) == inside


def test_modelopts_own_file_beside_a_config_says_how_it_is_quantised(tmp_path):
    saver("hf_quant_config.json")(tmp_path, {"producer": {}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": []}})
    assert read_model(written(tmp_path, TWO_LAYERS)).expert_bits == 4.5


@pytest.mark.parametrize(
    ("kinds", "bits"),
    [
        ({"mlp.experts.0.gate_proj": "W8A8_DYNAMIC", "mlp.experts.0.down_proj": "W8A8_DYNAMIC"}, 8),
        ({"mlp.experts.0.gate_proj": "FLOAT", "self_attn.q_proj": "W8A8"}, None),
        ({"mlp.experts.0.gate_proj": "W8A8_MXFP8", "mlp.experts.0.down_proj": "FLOAT"}, (2 * 8.25 + 16) / 3),
    ],
)
def test_modelslims_list_beside_a_config_says_how_each_matrix_is_quantised(tmp_path, kinds, bits):
    names = {f"model.layers.{layer}.{name}.weight": kind for layer in range(2) for name, kind in kinds.items()}
    saver("quant_model_description.json")(tmp_path, {"model_quant_type": "W8A8_DYNAMIC"} | names)
    assert read_model(written(tmp_path, TWO_LAYERS)).expert_bits == (bits and pytest.approx(bits))


WITHOUT_K = {name: value for name, value in MIXTRAL.items() if name != "num_experts_per_tok"}


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}, ("not an MoE", "num_local_experts")),
        ({**MIXTRAL, "num_local_experts": 1}, ("not an MoE",)),
        (WITHOUT_K, ("experts_per_token is missing", "num_experts_per_tok")),
        ({**MIXTRAL, "num_local_experts": "8"}, ("num_local_experts", "'8'")),
        ({**MIXTRAL, "num_experts_per_tok": [1, 2]}, ("num_experts_per_tok", "differs")),
        ({**MIXTRAL, "num_hidden_layers": 10**9}, ("1000000000 layers",)),
        ({**MIXTRAL, "decoder_sparse_step": 0}, ("decoder_sparse_step",)),
        ({**MIXTRAL, "moe_layer_freq": [1]}, ("moe_layer_freq", "per layer")),
        ({**MIXTRAL, "moe_layers": 3}, ("moe_layers", "list")),
        ({**MIXTRAL, "torch_dtype": "int4"}, ("torch_dtype", "'int4'")),
        (MIXTRAL | {"quantization_config": {"quant_method": "mystery"}}, ("quantization_config", "'mystery'")),
        (MIXTRAL | {"quantization_config": {"quant_algo": "W1A1"}}, ("quantization_config", "'W1A1'")),
        (MIXTRAL | {"quantization_config": {"quant_method": "awq"}}, ("quantization_config", "bits and group_size")),
        (MIXTRAL | {"quantization_config": COMPRESSED | {"ignore": ["re:("]}}, ("'('", "no regular expression")),
        (MIXTRAL | {"quantization_config": COMPRESSED | {"ignore": ["re:(x+)+y"]}}, ("repeats too much",)),
        (MIXTRAL | {"quantization_config": COMPRESSED | {"ignore": 3}}, ("'3'", "modules are listed")),
        (MIXTRAL | {"quantization_config": HUMMING | {"b_dtype": "ternary"}}, ("quantization_config", "b_dtype 'ternary'")),
        (MIXTRAL | {"quantization_config": HUMMING | {"weight_scale_group_size": "x"}}, ("quantization_config", "humming")),
        (MIXTRAL | {"quantization_config": {"quant_method": "torchao"}}, ("quantization_config", "'torchao'")),
        (MIXTRAL | {"quantization_config": COMPRESSED | {"format": "marlin-24"}}, ("quantization_config", "sparsity_config")),
        (MIXTRAL | {"quantization_config": "fp8"}, ("quantization_config", "must be an object")),
        (MIXTRAL | {"num_experts": 16}, ("num_local_experts 8 and num_experts 16",)),
        (MIXTRAL | {"per_layer_config": {"3": {"num_experts": 4}}}, ("per_layer_config", "experts of their own")),
        (MIXTRAL | {"moe_layers_enum": "5-3"}, ("moe_layers_enum", "list of layers")),
        (MIXTRAL | {"hybrid_override_pattern": "ME*E"}, ("hybrid_override_pattern", "4 blocks")),
        (MIXTRAL | {"hybrid_override_pattern": "X" * 32}, ("hybrid_override_pattern", "'X'")),
        (MIXTRAL | {"moe_upper_width": 64}, ("moe_upper_width", "does not know")),
        (MIXTRAL | {"model_type": "jetmoe"}, ("model_type", "'jetmoe'")),
        ({**MIXTRAL, "num_experts_per_tok": 9}, ("only 8 experts",)),
        ({"name": "mine", "experts": 4}, ("layers", "Field required")),
        ([], ("JSON object",)),
    ],
)
def test_bad_models(tmp_path, config, parts):
    refused(written(tmp_path, config), *parts, read=read_model)


@pytest.mark.parametrize("read", [read_cluster, read_plan, read_model])
@pytest.mark.parametrize("text", [b"[]", b"{}", b"{", b"[" * 100_000, b'{"name": 1e999}', b"\xed\xa0\x80"])
def test_bad_json(tmp_path, read, text):
    refused(written(tmp_path, text), read=read)
