"""Attention, other mixers, dense layers and vocabulary of a config: the sizes that a whole step of serving needs."""

from pathlib import Path

from engine.cluster import BITS_PER_DTYPE
from engine.formats.huggingface.config import (
    DENSE_WIDTHS,
    HEADS,
    KV_HEADS,
    NAMES,
    Config,
    blocks_of,
    config_of,
    layers_with_experts,
    mixers_of,
)
from engine.formats.huggingface.number_formats import NumberFormats, number_formats
from engine.formats.source import quoted
from engine.serving.sizes import Mixer, TransformerSizes

OTHER_KEYS = (
    *("attention_k_eq_v", "hidden_size_per_layer_input", "num_kv_shared_layers", "enable_moe_block", "hc_mult"),
    *("router_hidden_size", "loop_num_passes", "number_of_conv_states", "mla_use_output_gate", "use_double_wide_mlp"),
)
"""Keys that do not look like sizes, of models whose layers have further matrices or keep other numbers of a token."""

OTHER_TYPES = {
    "longcat_flash": "has two attentions and two dense FFNs in every layer",
    "openai_privacy_filter": "is an encoder",
    "zaya": "convolves queries and keys",
}
GATED = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "afmoe", "beam", "muse_spark"), "wide"),
    **{"muse_spark_text": "wide", "step3p5": "heads", "step3p7": "heads", "laguna": "heads"},
}
"""Families whose attention output is multiplied by a gate as wide as that output, or of one number a head."""

GATED_SHARED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families with a gate in front of the shared expert: one row of d_model weights a layer."""

STATE_KEYS = {"linear": ("linear_num_value_heads",), "mamba": ("ssm_state_size", "mamba_d_state"), "conv": ("conv_L_cache",)}
"""Keys of mixers: one without a layer of its kind means that the list of layers is not known."""

NEEDED_IN_WINDOWS = {"mimo_v2_flash": "swa_num_key_value_heads"}
"""Families whose layers with a sliding window have other key-value heads, and the key that has to say how many."""

SAME_IN_WINDOWS = {
    "swa_num_attention_heads": HEADS,
    "num_sliding_attention_heads": HEADS,
    "swa_head_dim": ("head_dim",),
    "swa_v_head_dim": ("v_head_dim",),
    "num_attention_heads_per_layer": HEADS,
}
"""Keys that have to say the same of layers with a sliding window as the others of all layers."""


def sizes_of_config(data: dict, path: Path) -> TransformerSizes:
    """The sizes outside the experts that a parsed `config.json` tells. Raises InputError if one of them is missing, and names
    the key of anything that `TransformerSizes` does not know."""
    return sizes_of(config_of(data, path))


def sizes_of(config: Config, formats: NumberFormats | None = None) -> TransformerSizes:
    """As `sizes_of_config`. formats: of the weights, for a caller that has them"""
    for name in (*config.unknown_sizes(), *OTHER_KEYS):
        if config.get(name) not in (None, False, 0, [], {}):
            raise config.fault("may change attention or layers, and Switchyard does not know how", (name,))
    if (reason := OTHER_TYPES.get(config.model_type)) is not None:
        raise config.fault(f"{quoted(config.model_type)} {reason}, which Switchyard does not know", ("model_type",))
    if (name := NEEDED_IN_WINDOWS.get(config.model_type)) is not None and config.get(name) is None:
        raise config.fault("is missing, and layers with a sliding window have other heads in this family", (name,))
    for name, usual in SAME_IN_WINDOWS.items():
        if (number := config.number("heads", (name,))) not in (None, config.number("heads", usual)):
            raise config.fault(f"differs from {usual[0]}, which Switchyard does not know", (name,), number)
    needed, blocks = config.needed, blocks_of(config)
    layers = len(blocks) if blocks else needed("layers", NAMES["layers"])
    d_model, heads = needed("d_model", NAMES["d_model"]), needed("heads", HEADS)
    mixers, with_experts = mixers_of(config, layers, blocks), layers_with_experts(config, layers, blocks)
    for kind, names in STATE_KEYS.items():
        if kind not in mixers and config.get(*names) is not None:
            raise config.fault(f"belongs to layers that no key lists ({kind})", names)
    dense = blocks.count("mlp") if blocks else layers - len(with_experts)
    dense_d_ff = config.number("dense_d_ff", DENSE_WIDTHS)
    sizes = {
        "heads": heads,
        "dense_d_ff": dense_d_ff or (needed("dense_d_ff", DENSE_WIDTHS) if dense else needed("d_ff", NAMES["d_ff"])),
        "dense_ffns": dense if blocks else None,
        "vocabulary": needed("vocabulary", ("vocab_size",)),
        "tied_embeddings": config.outermost("tie_word_embeddings") is True,
        "shared_gate": config.model_type in GATED_SHARED,
        "mixers": _mixers(config, mixers, d_model, heads),
        **_windows(config, mixers),
        **(_latent(config, layers, heads) if config.number("kv_rank", ("kv_lora_rank",)) else _grouped(config, d_model, heads)),
    }
    sizes["gate"] = _gate(config, heads, sizes["value_size"])
    formats = formats or number_formats(config, layers, with_experts, mixers)
    for part in ("attention", "shared", "dense") if dense else ("attention", "shared"):
        if formats.bits[part] != BITS_PER_DTYPE[formats.dtype]:
            sizes[f"{part}_bits"] = formats.bits[part]
    return TransformerSizes.from_dict(sizes, config.path.name)


def _latent(config: Config, layers: int, heads: int) -> dict:
    needed = config.needed
    sparse = config.number("sparse_keys", ("index_topk",)) or 0
    if sparse and not config.number("q_rank", ("q_lora_rank",)):
        raise config.fault("is of sparse attention without latent queries, which Switchyard does not know", ("index_topk",))
    listed = config.one_per_layer(layers, "indexer_types")
    if listed is None and (config.get("index_topk_freq") or 1) != 1:
        raise config.fault("shares an index between layers that no key names; indexer_types lists them", ("index_topk_freq",))
    return {
        "kv_heads": heads,
        "head_size": needed("head_size", ("qk_nope_head_dim",)),
        "value_size": needed("value_size", ("v_head_dim",)),
        "rope_size": config.number("rope_size", ("qk_rope_head_dim",), least=0) or 0,
        "kv_rank": needed("kv_rank", ("kv_lora_rank",)),
        "q_rank": config.number("q_rank", ("q_lora_rank",)) or 0,
        "sparse_keys": sparse,
        "index_heads": (config.number("index_heads", ("index_n_heads",)) or 0) if sparse else 0,
        "index_size": (config.number("index_size", ("index_head_dim",)) or 0) if sparse else 0,
        "index_layers": sum(kind == "full" for kind in listed[:layers]) if listed and sparse else None,
    }


def _grouped(config: Config, d_model: int, heads: int) -> dict:
    size = config.number("head_size", ("head_dim",)) or d_model // heads
    return {
        "kv_heads": config.number("kv_heads", KV_HEADS) or heads,
        "head_size": size,
        "value_size": config.number("value_size", ("v_head_dim",)) or size,
    }


def _gate(config: Config, heads: int, value_size: int) -> int:
    """Numbers of the gate on attention's output."""
    stated = config.get("attn_output_gate", "attention_output_gate", "use_attention_output_gate")
    per_head = config.get("use_head_wise_attn_gate", "gating")
    kind = GATED.get(config.model_type)
    if kind == "heads" or per_head is True:
        return 0 if per_head is False else heads
    return heads * value_size if (kind == "wide" and stated is not False) or stated is True else 0


def _windows(config: Config, mixers: list[str]) -> dict[str, int]:
    """The sliding window and how many layers have it, if the config lists them."""
    window = config.number("window", ("sliding_window", "sliding_window_size", "attention_chunk_size"), least=0)
    layers = mixers.count("sliding")
    if not window or not layers or config.get("use_sliding_window") is False:
        return {}
    return {
        "window": window,
        "windowed_layers": layers,
        "window_kv_heads": config.number("window_kv_heads", ("swa_num_key_value_heads",)) or 0,
    }


def _mixers(config: Config, mixers: list[str], d_model: int, heads: int) -> list[Mixer]:
    """Layers that keep a state of fixed size instead of keys and values."""
    found = []
    for kind in ("linear", "mamba", "conv"):
        if layers := mixers.count(kind):
            sizes = {"linear": _linear, "mamba": _mamba, "conv": _convolution}[kind](config, d_model, heads)
            found.append(Mixer(layers=layers, **sizes))
    return found


def _linear(config: Config, d_model: int, heads: int) -> dict:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5), or lightning attention (MiniMax-Text-01)."""
    needed, half = config.needed, 2
    if config.get("linear_num_value_heads") is not None:
        keys = needed("key heads", ("linear_num_key_heads",)) * needed("key size", ("linear_key_head_dim",))
        value_heads = needed("value heads", ("linear_num_value_heads",))
        values = value_heads * needed("value size", ("linear_value_head_dim",))
        kernel, mixed = needed("kernel", ("linear_conv_kernel_dim",)), 2 * keys + values
        state = values * needed("key size", ("linear_key_head_dim",)) * _state_bytes(config, 4)
        return {
            "name": "gated DeltaNet",
            "projections": ((2 * keys + 2 * values + 2 * value_heads, d_model), (d_model, values)),
            "further": mixed * kernel,
            "state_bytes": state + mixed * (kernel - 1) * half,
        }
    if config.model_type.startswith("minimax"):
        size = config.number("head_size", ("head_dim",)) or d_model // heads
        return {
            "name": "lightning attention",
            "projections": ((4 * heads * size, d_model), (d_model, heads * size)),
            "further": 0,
            "state_bytes": heads * size * size * _state_bytes(config, 4),
        }
    raise config.fault("has linear attention of a kind that Switchyard does not know", ("layer_types", "layer_group_size"))


def _mamba(config: Config, d_model: int, heads: int) -> dict:
    """Mamba-2 where heads are stated (Nemotron-H, Granite 4), else Mamba (Jamba)."""
    needed, half = config.needed, 2
    state = needed("state", ("ssm_state_size", "mamba_d_state"))
    kernel = needed("kernel", ("conv_kernel", "mamba_d_conv"))
    expand = config.number("expand", ("expand", "mamba_expand")) or 2
    if (count := config.number("heads", ("mamba_num_heads", "mamba_n_heads"))) is not None:
        size = config.get("mamba_head_dim", "mamba_d_head")
        inner = count * size if type(size) is int else expand * d_model
        groups = config.number("groups", ("n_groups", "mamba_n_groups")) or 1
        mixed = inner + 2 * groups * state
        return {
            "name": "Mamba-2",
            "projections": ((inner + mixed + count, d_model), (d_model, inner)),
            "further": mixed * kernel,
            "state_bytes": inner * state * _state_bytes(config, half) + mixed * (kernel - 1) * half,
        }
    inner = expand * d_model
    rank = config.number("rank", ("mamba_dt_rank",)) or -(-d_model // 16)
    return {
        "name": "Mamba",
        "projections": ((2 * inner, d_model), (rank + 2 * state, inner), (inner, rank), (d_model, inner)),
        "further": inner * (kernel + state),
        "state_bytes": inner * state * _state_bytes(config, half) + inner * (kernel - 1) * half,
    }


def _convolution(config: Config, d_model: int, heads: int) -> dict:
    """Short convolutions (LFM2)."""
    kernel = config.number("kernel", ("conv_L_cache",)) or 3
    width = config.number("width", ("conv_dim",)) or d_model
    return {
        "name": "short convolution",
        "projections": ((3 * width, d_model), (d_model, width)),
        "further": width * kernel,
        "state_bytes": width * (kernel - 1) * 2,
    }


def _state_bytes(config: Config, usual: int) -> int:
    """Bytes of one number of a state."""
    stated = config.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    return {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(stated).removeprefix("torch."), usual)
