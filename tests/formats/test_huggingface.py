"""Models from Hugging Face configs and from our own JSON."""

import pytest

from engine.formats import read_cluster, read_model, read_plan
from tests.cases.files import DEEPSEEK_V3, GPT_OSS, LLAMA_4, MIXTRAL, QWEN2_MOE, refused, saver

written = saver("config.json")
OLMOE = {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
OLMOE |= {"num_experts": 64, "num_experts_per_tok": 8, "torch_dtype": "float32"}
PERIOD = {"num_hidden_layers": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
SPARSE = {"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}
NAMED = {"num_experts_per_tok": [2, 2], "_name_or_path": "mistralai/Mixtral-8x7B"}
HYBRID = {"hybrid_override_pattern": "ME*E", "mlp_hidden_act": "relu2"}
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
        (MIXTRAL | HYBRID, {"layers": 4, "dense_layers": (0, 2), "ffn_matrices": 2}),
        (MIXTRAL | NAMED, {"experts_per_token": 2, "name": "Mixtral-8x7B"}),
    ],
)
def test_families(tmp_path, config, expected):
    model = read_model(written(tmp_path, config))
    assert {field: getattr(model, field) for field in expected} == expected


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
