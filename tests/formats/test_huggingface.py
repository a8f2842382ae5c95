"""Models from Hugging Face configs and from our own JSON."""

import pytest

from engine.formats import read_cluster, read_model, read_plan, read_sizes
from tests.cases.files import DEEPSEEK_V3, GPT_OSS, LLAMA_4, MIXTRAL, QWEN2_MOE, refused, saver

written = saver("config.json")
OLMOE = {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
OLMOE |= {"num_experts": 64, "num_experts_per_tok": 8, "torch_dtype": "float32"}
PERIOD = {"num_hidden_layers": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
SPARSE = {"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}
NAMED = {"num_experts_per_tok": [2, 2], "_name_or_path": "mistralai/Mixtral-8x7B"}
HYBRID = {"hybrid_override_pattern": "ME*E", "mlp_hidden_act": "relu2"}
TWO_LAYERS = MIXTRAL | {"num_hidden_layers": 2}
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
    ],
)
def test_families(tmp_path, config, expected):
    model = read_model(written(tmp_path, config))
    assert {field: getattr(model, field) for field in expected} == expected


FP8_GROUP = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}
INT4_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}
NVFP4_GROUP = {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
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
        ({"quant_method": "mxfp4"}, "bf16", 4.25),
        ({"quant_method": "quark", "global_quant_config": QUARK, "exclude": ["lm_head"]}, "bf16", 4.25),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bf16", 4.5),
        ({"quant_method": "int8"}, "bf16", 8),
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
