"""The sizes of a transformer beside its experts, and reading them from `config.json`."""

import json

import pytest

from engine.errors import InputError
from engine.formats import is_huggingface, read_sizes
from engine.serving.sizes import TransformerSizes
from tests.formats.test_huggingface import DEEPSEEK_V3, MIXTRAL
from tests.serving.samples import DEEPSEEK, DEEPSEEK_SIZES, QWEN, QWEN_SIZES

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


def test_latent_attention_is_read(read):
    assert read(LATENT) == DEEPSEEK_SIZES


def test_sparse_latent_attention_is_read(read):
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


def test_sliding_windows_are_read_where_layers_have_them(read):
    kinds = ["sliding_attention", "full_attention"] * 16
    sizes = read(GROUPED | {"sliding_window": 128, "layer_types": kinds})
    assert (sizes.window, sizes.windowed_layers) == (128, 16)
    assert sizes.kept_numbers(1000, 32) == 16 * (1000 + 128) * sizes.kv_numbers
    pattern = read(GROUPED | {"sliding_window": 128, "hybrid_layer_pattern": [0] + [1] * 31})
    assert pattern.windowed_layers == 31
    assert read(GROUPED | {"sliding_window": 4096}).windowed_layers == 0  # a setting that no layer has


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LATENT | {"index_topk": 2048},
            "config.json: sparse attention (DSA) needs sparse_keys, index_heads and index_size",
        ),
        (
            GROUPED | {"ssm_state_size": 128},
            "config.json, ssm_state_size: has layers of linear, state-space or other sparse",
        ),
        ({**GROUPED, "vocab_size": None}, "config.json: vocabulary is missing; none of vocab_size is there"),
        (GROUPED | {"num_key_value_heads": 5}, "32 heads cannot share 5 key-value heads evenly"),
        ({"model_type": "llama", "hidden_size": 64}, "is not an MoE model"),
    ],
)
def test_what_cannot_be_used_is_named(read, config, message):
    with pytest.raises(InputError, match=r"config\.json") as error:
        read(config)
    assert message in str(error.value)


def test_which_files_are_of_hugging_face(tmp_path):
    theirs, ours = tmp_path / "config.json", tmp_path / "ours.json"
    theirs.write_text(json.dumps(GROUPED))
    ours.write_text(DEEPSEEK.to_json())
    assert is_huggingface(theirs) and not is_huggingface(ours)


def test_the_cache_keeps_a_latent_for_all_heads_or_keys_and_values_of_each():
    assert DEEPSEEK_SIZES.kv_numbers == 576
    assert QWEN_SIZES.kv_numbers == 2 * 4 * 128


def test_all_weights_together_are_what_the_models_are_named_for():
    for model, sizes, billions in ((DEEPSEEK, DEEPSEEK_SIZES, 671), (QWEN, QWEN_SIZES, 30.5)):
        experts = len(model.moe_layers) * model.experts * 3 * model.d_model * model.d_ff
        assert (experts + sum(sizes.weights(model))) / 1e9 == pytest.approx(billions, rel=0.005)


def test_tied_embeddings_are_one_matrix():
    tied = QWEN_SIZES.model_copy(update={"tied_embeddings": True})
    assert QWEN_SIZES.weights(QWEN)[1] - tied.weights(QWEN)[1] == 151936 * 2048
