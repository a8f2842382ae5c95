"""Hugging Face `config.json` of MoE models. Families name the same size differently; the tables below list the names
as transformers 5 has them, most specific first."""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.formats.format import Format
from engine.formats.source import fault, quoted
from engine.model import MoEModel
from engine.serving.sizes import TransformerSizes

TELLING_KEYS = {"model_type", "architectures", "num_hidden_layers", "hidden_size", "transformers_version"}
"""Keys that no MoEModel of ours has."""

LANGUAGE_PARTS = (
    *((), ("text_config",), ("llm_config",), ("language_config",)),
    *(("thinker_config", "text_config"), ("ffn_config",)),
)
"""Places of the language model in a multimodal config (DBRX keeps its experts in `ffn_config`)."""

NAMES = {
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": (
        *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    ),
    "d_model": ("hidden_size", "d_model"),
    "d_ff": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size"),
    "layers": ("num_hidden_layers", "num_layers", "n_layers"),
}
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
DENSE_WIDTHS = ("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp")
OTHER_ATTENTION = (
    *("compress_ratios", "index_topk_freq", "sparse_attention_config", "linear_attn_config", "linear_num_value_heads"),
    *("hybrid_override_pattern", "ssm_state_size"),
)
"""Keys of models with layers of other than usual, latent or sparse latent attention."""
SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


@dataclass(frozen=True)
class _Config:
    """A config file: its nested parts, the one with the experts first, so that outer ones fill the gaps."""

    path: Path
    parts: tuple[dict, ...]

    def get(self, *names: str) -> object:
        """The value of the first of `names` that is there and not null, in the innermost part that has any."""
        return next((part[name] for part in self.parts for name in names if part.get(name) is not None), None)

    def number(self, field: str, names: tuple[str, ...], least: int = 1) -> int | None:
        """A whole number; a list with one entry per layer counts when its entries are equal."""
        value = self.get(*names)
        if isinstance(value, list) and value:
            if any(entry != value[0] for entry in value):
                raise self.fault(f"{field} differs from layer to layer, which Switchyard cannot plan", names, value)
            value = value[0]
        if value is not None and (type(value) is not int or value < least):
            raise self.fault(f"must be a whole number of at least {least}, not {quoted(value)}", names)
        return value

    def needed(self, field: str, names: tuple[str, ...]) -> int:
        """As `number`, which must be there."""
        if (number := self.number(field, names)) is None:
            raise fault(self.path, f"{field} is missing; none of {', '.join(names)} is there")
        return number

    def layers(self, name: str) -> list | None:
        """A list of layer numbers."""
        listed = self.get(name)
        if listed is not None and not isinstance(listed, list):
            raise self.fault(f"must be a list of layers, not {quoted(listed)}", (name,))
        return listed

    def fault(self, text: str, names: tuple[str, ...], value: object = None) -> InputError:
        """An InputError that names the key in use."""
        key = next((name for part in self.parts for name in names if part.get(name) is not None), names[0])
        return fault(self.path, text + (f" ({quoted(value)})" if value is not None else ""), key)


def model_of_config(data: dict, path: Path) -> MoEModel:
    """The model that a parsed `config.json` describes; raises InputError if it has no experts or lacks a size.

    Expert weights quantised to 8-bit floats count as fp8 whatever `dtype` says; 4-bit weights are not modelled and keep
    `dtype` (bf16 when absent). `batch` and `sequence_length` are no part of a config and keep their defaults.
    """
    config = _Config(path, _parts_with_experts(data, path))
    blocks = _blocks(config)
    sizes = {} if blocks is None else {"layers": len(blocks)}
    for field in (field for field in NAMES if field not in sizes):
        sizes[field] = config.needed(field, NAMES[field])
    # Beyond this MoEModel refuses anyway; checked here because one entry per layer is made next.
    if sizes["layers"] > 1000:
        raise fault(path, f"{sizes['layers']} layers are too many (at most 1000)")
    plain = config.get("mlp_hidden_act") == "relu2"
    kv_numbers = None  # which is not known of attention of other kinds
    with contextlib.suppress(InputError):
        kv_numbers = sizes_of_config(data, path).kv_numbers
    return MoEModel.from_dict(
        {
            "name": _name(config),
            **sizes,
            "dense_layers": tuple(layer for layer in range(sizes["layers"]) if not _has_experts(config, layer, blocks)),
            "ffn_matrices": 2 if plain else 3,
            "shared_experts": _shared_experts(config, sizes["d_ff"]),
            "dtype": _dtype(config),
            "kv_numbers": kv_numbers,
        },
        path.name,
    )


def sizes_of_config(data: dict, path: Path) -> TransformerSizes:
    """Attention, dense layers and vocabulary of the same `config.json`. Raises InputError if one of them is missing, and for
    attention of other kinds than `TransformerSizes` knows."""
    config = _Config(path, _parts_with_experts(data, path))
    if (key := next((name for name in OTHER_ATTENTION if config.get(name) is not None), None)) is not None:
        raise fault(path, "has layers of linear, state-space or other sparse attention, which Switchyard does not know", key)
    needed = config.needed
    heads, kv_rank = needed("heads", HEADS), config.number("kv_rank", ("kv_lora_rank",))
    sizes = {
        "heads": heads,
        "dense_d_ff": needed("dense_d_ff", DENSE_WIDTHS),
        "vocabulary": needed("vocabulary", ("vocab_size",)),
        "tied_embeddings": config.get("tie_word_embeddings") is True,
        **_windows(config),
    }
    if kv_rank:
        sizes |= {
            "kv_heads": heads,
            "head_size": needed("head_size", ("qk_nope_head_dim",)),
            "value_size": needed("value_size", ("v_head_dim",)),
            "rope_size": needed("rope_size", ("qk_rope_head_dim",)),
            "kv_rank": kv_rank,
            "q_rank": config.number("q_rank", ("q_lora_rank",)) or 0,
            "sparse_keys": config.number("sparse_keys", ("index_topk",)) or 0,
            "index_heads": config.number("index_heads", ("index_n_heads",)) or 0,
            "index_size": config.number("index_size", ("index_head_dim",)) or 0,
        }
    else:
        size = config.number("head_size", ("head_dim",)) or needed("d_model", NAMES["d_model"]) // heads
        sizes |= {"kv_heads": config.number("kv_heads", KV_HEADS) or heads, "head_size": size, "value_size": size}
    return TransformerSizes.from_dict(sizes, path.name)


def _windows(config: _Config) -> dict[str, int]:
    """The sliding window and how many layers have it, if the config lists them."""
    window = config.number("window", ("sliding_window",))
    kinds = config.get("layer_types", "hybrid_layer_pattern")
    listed = sum(kind in ("sliding_attention", 1) for kind in kinds) if isinstance(kinds, list) else 0
    return {"window": window, "windowed_layers": listed} if window and listed else {}


def _parts_with_experts(data: dict, path: Path) -> tuple[dict, ...]:
    """The part of the config that has experts, then the parts around it."""
    for way in LANGUAGE_PARTS:
        parts = [data]
        for key in way:
            parts.append(parts[-1].get(key) if isinstance(parts[-1], dict) else None)
        if not all(isinstance(part, dict) for part in parts):
            continue
        counts = [parts[-1].get(name) for name in NAMES["experts"]]
        if any(count not in (None, 0, 1) for count in counts):
            return tuple(reversed(parts))
    raise fault(path, f"is not an MoE model: no field for the number of experts ({', '.join(NAMES['experts'])}) above 1")


def _blocks(config: _Config) -> list | None:
    """The kind of every block of a hybrid model (Nemotron-H), in which an MoE layer is a block of its own."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return ["moe" if mark == "E" else "other" for mark in pattern]
    blocks = config.get("layers_block_type", "layer_types")
    return blocks if isinstance(blocks, list) and "moe" in blocks else None


def _has_experts(config: _Config, layer: int, blocks: list | None) -> bool:
    """True if a decoder layer is an MoE layer: every rule that the config states must say so."""
    if blocks is not None:
        return blocks[layer] == "moe"
    if (kinds := _one_per_layer(config, "mlp_layer_types", layer)) is not None:
        return kinds[layer] != "dense"
    if (listed := config.get("moe_layers_enum")) is not None:
        return str(layer) in str(listed).split(",")
    if (listed := config.layers("moe_layers")) is not None:
        return layer in listed

    def number(name: str, default: int, least: int = 0) -> int:
        value = config.number(name, (name,), least)
        return default if value is None else value

    last = number("moe_layer_end_index", -1, least=-1)
    rules = [
        layer >= number("first_k_dense_replace", 0),
        layer >= number("num_dense_layers", 0),
        layer >= number("moe_layer_start_index", 0),
        last == -1 or layer <= last,
        (layer + 1) % number("decoder_sparse_step", 1, least=1) == 0,
        (layer + 1) % number("moe_layer_interval", 1, least=1) == 0,
        (layer + 1) % number("interleave_moe_layer_step", 1, least=1) == 0,
        layer % number("expert_layer_period", 1, least=1) == number("expert_layer_offset", 0),
    ]
    if isinstance(config.get("moe_layer_freq"), list):
        rules.append(bool(_one_per_layer(config, "moe_layer_freq", layer)[layer]))
    else:
        rules.append(layer % number("moe_layer_freq", 1, least=1) == 0)
    return all(rules) and layer not in (config.layers("mlp_only_layers") or ())


def _one_per_layer(config: _Config, name: str, layer: int) -> list | None:
    """A list that must reach at least as far as `layer` (entries for prediction layers may follow)."""
    entries = config.get(name)
    if entries is not None and (not isinstance(entries, list) or len(entries) <= layer):
        raise config.fault("must be a list with one entry per layer", (name,))
    return entries


def _shared_experts(config: _Config, d_ff: int) -> int:
    """Shared experts, counted in widths of a routed one if the config gives their width."""
    if (count := config.number("shared_experts", SHARED_COUNTS, least=0)) is not None:
        return count
    if width := config.number("shared expert width", SHARED_WIDTHS, least=0):
        return math.ceil(width / d_ff)
    # Llama 4 and Hunyuan say it by their type or a switch: one, as wide as a routed expert.
    always = str(config.get("model_type")).startswith("llama4") or config.get("use_mixed_mlp_moe") is True
    return 1 if always else 0


def _dtype(config: _Config) -> str:
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict) and quantised.get("quant_method") in ("fp8", "fbgemm_fp8"):
        return "fp8"
    dtype = config.get("dtype", "torch_dtype")
    if dtype is None:
        return "bf16"
    known = DTYPES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise config.fault(f"is {quoted(dtype)}; known are {', '.join(DTYPES)}", ("dtype", "torch_dtype"))
    return known


def _name(config: _Config) -> str:
    """The checkpoint's name, else the file's unless that is the usual `config`, else the family."""
    checkpoint = str(config.parts[-1].get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    stem = "" if config.path.stem.lower() == "config" else config.path.stem
    return (checkpoint or stem or str(config.parts[-1].get("model_type") or "model"))[:80]


FORMATS = (Format("huggingface", "a Hugging Face config.json", "model", lambda glance: len(TELLING_KEYS & glance.keys) > 1),)
