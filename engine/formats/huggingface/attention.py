"""Attention, other mixers, dense layers and vocabulary of a config: the sizes that a whole step of serving needs."""

from collections.abc import Sequence
from pathlib import Path

from engine.cluster import BITS_PER_DTYPE
from engine.formats.huggingface.config import (
    DENSE_WIDTHS,
    HEAD_SIZES,
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
    *("hidden_size_per_layer_input", "num_kv_shared_layers", "hc_mult", "router_hidden_size", "loop_num_passes", "use_cla"),
    *("number_of_conv_states", "mla_use_output_gate", "use_double_wide_mlp"),
)
"""Keys that do not look like sizes, of models whose layers have further matrices or keep other numbers of a token."""

NOT_KEPT = (
    *("share_q_dim", "hc_mult", "router_hidden_size", "mla_use_output_gate", "use_double_wide_mlp", "attn_res_block_size"),
    "hidden_size_per_layer_input",
)
"""Those of the unknown keys that leave alone the numbers that attention keeps of a token."""

TWICE = ("longcat_flash", "longcat_flash_ngram")
"""Families with two attentions in every layer."""

OTHER_TYPES = {
    **dict.fromkeys(TWICE, "has two attentions and two dense FFNs in every layer"),
    "openai_privacy_filter": "is an encoder",
    "zaya": "convolves queries and keys",
}
GATED = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "afmoe", "beam", "muse_spark"), "wide"),
    **{"muse_spark_text": "wide", "step3p5": "heads", "step3p7": "heads", "laguna": "heads", "bailing_hybrid": "heads"},
}
"""Families whose attention output is multiplied by a gate as wide as that output, or of one number a head."""

GATED_SHARED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families with a gate in front of the shared expert: one row of d_model weights a layer."""

STATE_KEYS = {
    "linear": ("linear_num_value_heads", "linear_attn_config"),
    "mamba": ("ssm_state_size", "mamba_d_state"),
    "conv": ("conv_L_cache",),
}
"""Keys of mixers: one without a layer of its kind means that the list of layers is not known."""

MAMBA_DEFAULTS = {
    "nemotron_h": {
        **{"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4},
        "mamba_ssm_cache_dtype": "float32",
    },
    "jamba": {"mamba_d_state": 16, "mamba_d_conv": 4},
    "granitemoehybrid": {"mamba_d_state": 256, "mamba_n_heads": 128, "mamba_d_conv": 4},
}
"""Sizes that transformers (5.23) and engines give to a family's Mamba layers where its config leaves them out."""

NEEDED_IN_WINDOWS = {"mimo_v2_flash": "swa_num_key_value_heads"}
"""Families whose layers with a sliding window have other key-value heads, and the key that has to say how many."""

OF_WINDOWS = {
    **dict.fromkeys(("swa_num_attention_heads", "num_sliding_attention_heads"), HEADS[0]),
    **{"swa_num_key_value_heads": KV_HEADS[0], "swa_head_dim": HEAD_SIZES[0], "swa_v_head_dim": "v_head_dim"},
}
"""Keys that say of layers with a sliding window what another says of all."""

OF_OTHERS = {"global_head_dim": HEAD_SIZES[0], "num_global_key_value_heads": KV_HEADS[0]}
"""Keys that say it of layers without a window."""

OF_KINDS = ("per_layer_config", "num_attention_heads_per_layer", "attention_other_setting", *OF_WINDOWS, *OF_OTHERS)
"""All keys that say it of some layers."""


def sizes_of_config(data: dict, path: Path) -> TransformerSizes:
    """The sizes outside the experts that a parsed `config.json` tells. Raises InputError if one of them is missing, and names
    the key of anything that `TransformerSizes` does not know."""
    return sizes_of(config_of(data, path))


def sizes_of(config: Config, formats: NumberFormats | None = None) -> TransformerSizes:
    """As `sizes_of_config`. formats: of the weights, for a caller that has them"""
    _refuse_unknown(config)
    if (reason := OTHER_TYPES.get(config.model_type)) is not None:
        raise config.fault(f"{quoted(config.model_type)} {reason}, which Switchyard does not know", ("model_type",))
    if (name := NEEDED_IN_WINDOWS.get(config.model_type)) is not None and config.get(name) is None:
        raise config.fault("is missing, and layers with a sliding window have other heads in this family", (name,))
    needed, blocks = config.needed, blocks_of(config)
    layers = len(blocks) if blocks else needed("layers", NAMES["layers"])
    d_model = needed("d_model", NAMES["d_model"])
    mixers, with_experts = mixers_of(config, layers, blocks), layers_with_experts(config, layers, blocks)
    _refuse_unlisted(config, mixers)
    dense = blocks.count("mlp") if blocks else layers - len(with_experts)
    dense_d_ff = config.number("dense_d_ff", DENSE_WIDTHS)
    attention = _attention(config, mixers, d_model)
    sizes = {
        "dense_d_ff": dense_d_ff or (needed("dense_d_ff", DENSE_WIDTHS) if dense else needed("d_ff", NAMES["d_ff"])),
        "dense_ffns": dense if blocks else None,
        "vocabulary": needed("vocabulary", ("vocab_size",)),
        "tied_embeddings": config.outermost("tie_word_embeddings", "tied_embeddings", "tie_embedding") is True,
        "shared_gate": config.model_type in GATED_SHARED,
        "mixers": _mixers(config, mixers, d_model, attention["heads"]),
        "gate": _gate(config, attention["heads"], attention["value_size"]),
        "values_from_keys": config.get("attention_k_eq_v") is True,
        **attention,
    }
    formats = formats or number_formats(config, layers, with_experts, mixers)
    for part in ("attention", "shared", "dense") if dense else ("attention", "shared"):
        if formats.bits[part] != BITS_PER_DTYPE[formats.dtype]:
            sizes[f"{part}_bits"] = formats.bits[part]
    return TransformerSizes.from_dict(sizes, config.path.name)


def kv_numbers_of(config: Config, mixers: Sequence[str], d_model: int) -> int:
    """Numbers that attention keeps of a token in one of its layers, in the mean. Raises InputError for a key that may change
    them."""
    _refuse_unknown(config, but=NOT_KEPT)
    _refuse_unlisted(config, mixers)
    layers = sum(mixer in ("full", "sliding") for mixer in mixers) or 1
    kept = TransformerSizes.model_construct(**_attention(config, mixers, d_model)).kept_numbers(1, layers)
    return round(kept / layers) * (2 if config.model_type in TWICE else 1)


def _refuse_unknown(config: Config, but: tuple[str, ...] = ()) -> None:
    for name in (*config.unknown_sizes(), *OTHER_KEYS):
        if name not in but and config.get(name) not in (None, False, 0, [], {}):
            raise config.fault("may change attention or layers, and Switchyard does not know how", (name,))


def _refuse_unlisted(config: Config, mixers: Sequence[str]) -> None:
    for kind, names in STATE_KEYS.items():
        if kind not in mixers and config.get(*names) is not None:
            raise config.fault(f"belongs to layers that no key lists ({kind})", names)


def _attention(config: Config, mixers: Sequence[str], d_model: int) -> dict:
    """Heads and what they keep, of layers without a sliding window and of those with one."""
    others, windows = _by_kind(config, mixers)
    usual = d_model // config.needed("heads", HEADS)
    rank = config.number("kv_rank", ("kv_lora_rank",), least=0) and config.get("use_mla") is not False
    found = _latent(others, len(mixers)) if rank else _grouped(others, usual) | _block_sparse(config, mixers)
    own = {} if rank and windows is config else _grouped(windows, usual)
    different = {f"window_{name}": size for name, size in own.items() if size != found[name]}
    if rank and (different or others is not config):
        raise config.fault("is of latent attention with other sizes in some layers, which Switchyard does not know", OF_KINDS)
    window = config.number("window", ("sliding_window", "sliding_window_size", "attention_chunk_size"), least=-1) or 0
    if not (layers := mixers.count("sliding")) or window <= 0 or config.get("use_sliding_window") is False:
        if different and layers:
            raise config.fault("is missing or off, and layers with a window have heads of their own", ("sliding_window",))
        return found
    return found | {"window": window, "windowed_layers": layers} | different


def _by_kind(config: Config, mixers: Sequence[str]) -> tuple[Config, Config]:
    """The config as layers without a sliding window have it, and as those with one. Raises InputError where layers of one kind
    differ."""
    found: dict[str, dict] = {"full": {}, "sliding": {}}
    for kind, names in (("sliding", OF_WINDOWS), ("full", OF_OTHERS)):
        found[kind] |= {usual: config.get(name) for name, usual in names.items() if config.get(name) is not None}
    if config.get("attention_k_eq_v") is False:  # Gemma 4 has the others' number then
        found["full"].pop(KV_HEADS[0], None)
    if isinstance(other := config.get("attention_other_setting"), dict):  # Step-3.5
        found["sliding"] |= other
    heads = config.one_per_layer(len(mixers), "num_attention_heads_per_layer") or ()
    own: list[dict] = [{HEADS[0]: count} for count in heads[: len(mixers)]] or [{} for _ in mixers]
    listed = config.get("per_layer_config")
    for layer, settings in listed.items() if isinstance(listed, dict) else [("", listed)] * bool(listed):
        if not (layer.isdecimal() and int(layer) < len(mixers) and isinstance(settings, dict)):
            raise config.fault("must be an object of objects, with layers as keys", ("per_layer_config",))
        if other := sorted(settings.keys() - {*HEADS, *KV_HEADS, *HEAD_SIZES, "v_head_dim"}):
            raise config.fault(f"has {other[0]}, which Switchyard does not know of single layers", ("per_layer_config",))
        own[int(layer)] |= settings
    for kind, settings in found.items():
        alike = [each for each, mixer in zip(own, mixers, strict=True) if mixer == kind]
        if any(each != alike[0] for each in alike):
            raise config.fault("differs among layers of one kind, which Switchyard does not know", OF_KINDS)
        settings |= alike[0] if alike else {}
    full, sliding = (Config(config.path, (each, *config.parts)) if each else config for each in found.values())
    return full, sliding


def _block_sparse(config: Config, mixers: Sequence[str]) -> dict:
    """Grouped attention to the best blocks of keys by an index (MiniMax-M3), in its own spelling or in that of transformers."""
    own, listed = config.get("sparse_attention_config"), config.get("layer_types")
    if isinstance(own, dict) and own.get("use_sparse_attention") is not False:
        inner = Config(config.path, (own, *config.parts))
        flags = inner.one_per_layer(len(mixers), "sparse_attention_freq") or [1] * len(mixers)
        plain = inner.one_per_layer(len(mixers), "sparse_disable_index_value") or [1] * len(mixers)
        if any(flag and not without for flag, without in zip(flags[: len(mixers)], plain, strict=False)):
            raise config.fault("has an index with values, which Switchyard does not know", ("sparse_attention_config",))
        layers = sum(map(bool, flags[: len(mixers)]))
        names = ("sparse_num_index_heads", "sparse_index_dim", "sparse_topk_blocks", "sparse_block_size")
    else:
        inner, layers = config, listed.count("minimax_m3_sparse") if isinstance(listed, list) else 0
        names = ("index_n_heads", "index_head_dim", "index_topk_blocks", "index_block_size")
    if not layers:
        if config.get("index_topk") is not None:
            raise config.fault("is of sparse attention without latent queries, which Switchyard does not know", ("index_topk",))
        return {}
    heads, size, blocks, keys = (inner.needed("sparse attention", (name,)) for name in names)
    return {"sparse_keys": blocks * keys, "index_heads": heads, "index_size": size, "sparse_layers": layers}


def _latent(config: Config, layers: int) -> dict:
    needed = config.needed
    heads = needed("heads", HEADS)
    sparse = config.number("sparse_keys", ("index_topk",)) or 0
    if sparse and not config.number("q_rank", ("q_lora_rank",), least=0):
        raise config.fault("is of sparse attention without latent queries, which Switchyard does not know", ("index_topk",))
    listed = config.one_per_layer(layers, "indexer_types")
    if listed is None and (config.get("index_topk_freq") or 1) != 1:
        raise config.fault("shares an index between layers that no key names; indexer_types lists them", ("index_topk_freq",))
    return {
        "heads": heads,
        "kv_heads": heads,
        "head_size": needed("head_size", ("qk_nope_head_dim",)),
        "value_size": needed("value_size", ("v_head_dim",)),
        "rope_size": config.number("rope_size", ("qk_rope_head_dim",), least=0) or 0,
        "kv_rank": needed("kv_rank", ("kv_lora_rank",)),
        "q_rank": config.number("q_rank", ("q_lora_rank",), least=0) or 0,
        "sparse_keys": sparse,
        "index_heads": (config.number("index_heads", ("index_n_heads",)) or 0) if sparse else 0,
        "index_size": (config.number("index_size", ("index_head_dim",)) or 0) if sparse else 0,
        "index_layers": sum(kind == "full" for kind in listed[:layers]) if listed and sparse else None,
    }


def _grouped(config: Config, usual: int) -> dict:
    heads, size = config.needed("heads", HEADS), config.number("head_size", HEAD_SIZES) or usual
    return {
        "heads": heads,
        "kv_heads": config.number("kv_heads", KV_HEADS) or heads,
        "head_size": size,
        "value_size": config.number("value_size", ("v_head_dim",), least=0) or size,
    }


def _gate(config: Config, heads: int, value_size: int) -> int:
    """Numbers of the gate on attention's output."""
    stated = config.get("attn_output_gate", "attention_output_gate", "use_attention_output_gate")
    per_head = config.get("use_head_wise_attn_gate", "gating")
    kind = GATED.get(config.model_type)
    if kind == "heads" or per_head is True:
        return 0 if per_head is False else heads
    return heads * value_size if (kind == "wide" and stated is not False) or stated is True else 0


def _mixers(config: Config, mixers: list[str], d_model: int, heads: int) -> list[Mixer]:
    """Layers that keep a state of fixed size instead of keys and values."""
    found = []
    for kind in ("linear", "mamba", "conv"):
        if layers := mixers.count(kind):
            sizes = {"linear": _linear, "mamba": _mamba, "conv": _convolution}[kind](config, d_model, heads)
            found.append(Mixer.from_dict({"layers": layers, **sizes}, config.path.name))
    return found


def _linear(config: Config, d_model: int, heads: int) -> dict:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5), delta attention (Kimi-Linear, Ling 3), or lightning attention (MiniMax-Text-01,
    Ring-linear)."""
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
    stated = config.get("linear_attn_config")
    own = Config(config.path, (stated, *config.parts)) if isinstance(stated, dict) else config
    low_rank = config.model_type == "kimi_linear"
    if low_rank or (config.model_type == "bailing_hybrid" and own.get("short_conv_kernel_size") is not None):
        names = ("head_dim",) if isinstance(stated, dict) else ("linear_head_dim", "head_dim")
        size = own.needed("key size", names)
        count = own.number("heads", ("num_heads",) if isinstance(stated, dict) else ("linear_num_heads",)) or heads
        kernel, wide = own.needed("kernel", ("short_conv_kernel_size", "linear_conv_kernel_dim")), count * size
        # Forget gate and output gate: of low rank, or one matrix each.
        gates = ((2 * size, d_model), (2 * wide, size)) if low_rank else ((2 * wide, d_model),)
        return {
            "name": "delta attention",
            "projections": ((3 * wide + count, d_model), *gates, (d_model, wide)),
            "further": 3 * wide * kernel,
            "state_bytes": wide * size * _state_bytes(config, 4) + 3 * wide * (kernel - 1) * half,
        }
    if config.model_type.startswith("minimax") or config.model_type == "bailing_moe_linear":
        size = config.number("head_size", HEAD_SIZES) or d_model // heads
        return {
            "name": "lightning attention",
            "projections": ((4 * heads * size, d_model), (d_model, heads * size)),
            "further": 0,
            "state_bytes": heads * size * size * _state_bytes(config, 4),
        }
    raise config.fault("has linear attention of a kind that Switchyard does not know", ("layer_types", "layer_group_size"))


def _mamba(config: Config, d_model: int, heads: int) -> dict:
    """Mamba-2 where heads are stated (Nemotron-H, Granite 4), else Mamba (Jamba)."""
    config = Config(config.path, (*config.parts, MAMBA_DEFAULTS.get(config.model_type, {})))
    needed, half = config.needed, 2
    state = needed("Mamba's state size", ("ssm_state_size", "mamba_d_state"))
    kernel = needed("Mamba's kernel", ("conv_kernel", "mamba_d_conv"))
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
