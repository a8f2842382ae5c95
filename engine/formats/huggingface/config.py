"""A Hugging Face `config.json`: its nested parts, its keys, and its layers: which have experts, and of which kind the attention
or other mixer of each is. Families name the same size differently; the tables list the names as transformers 5 has them, most
specific first."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.formats.source import fault, quoted, read_json_object

TELLING_KEYS = {"model_type", "architectures", "num_hidden_layers", "hidden_size", "transformers_version"}
"""Keys that no MoEModel of ours has."""

LANGUAGE_PARTS = (
    *((), ("text_config",), ("llm_config",), ("language_config",), ("language_model",)),
    *(("thinker_config", "text_config"), ("thinker_config",), ("ffn_config",), ("text_config", "ffn_config")),
)
"""Places of the language model in a multimodal config (DBRX keeps its experts in `ffn_config`)."""

NAMES = {
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": (
        *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
        "experts_per_token",
    ),
    "d_model": ("hidden_size", "d_model"),
    "d_ff": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size"),
    "layers": ("num_hidden_layers", "num_layers", "n_layers"),
}
EXPERT_WIDTHS = ("moe_latent_size", "routed_expert_hidden_size", "moe_hidden_size")
ZERO_EXPERTS = ("zero_expert_num",)
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
DENSE_WIDTHS = ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size")
SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_WIDTHS = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"),
    *("shared_intermediate_size", "share_expert_dim"),
)

OTHER_SIZES = frozenset(
    (
        *("head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"),
        *("index_topk", "index_n_heads", "index_head_dim", "index_topk_freq", "indexer_types", "index_skip_topk_offset"),
        *("vocab_size", "sliding_window", "sliding_window_size", "attention_chunk_size", "sliding_window_pattern"),
        *(
            "swa_num_attention_heads",
            "swa_num_key_value_heads",
            "swa_head_dim",
            "swa_v_head_dim",
            "num_sliding_attention_heads",
        ),
        *("num_attention_heads_per_layer", "global_attn_every_n_layers", "prefix_dense_sliding_window_pattern"),
        *("layer_types", "layers_block_type", "mlp_layer_types", "attention_types", "hybrid_layer_pattern", "attn_type_list"),
        *("hybrid_override_pattern", "full_attention_interval", "layer_group_size", "attn_layer_period", "attn_layer_offset"),
        *("full_attn_idxs", "is_moe_layer", "is_moe_layers", "moe_layers_enum", "moe_layers", "moe_layer_ids"),
        *("moe_layer_end_index", "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "decoder_sparse_step"),
        *("moe_layer_interval", "interleave_moe_layer_step", "expert_layer_period", "expert_layer_offset", "moe_layer_freq"),
        *("mlp_only_layers", "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_conv_kernel_dim", "ssm_state_size", "mamba_d_state", "conv_kernel", "mamba_d_conv", "expand", "mamba_expand"),
        *("mamba_num_heads", "mamba_n_heads", "mamba_head_dim", "mamba_d_head", "n_groups", "mamba_n_groups", "mamba_dt_rank"),
        *("conv_L_cache", "conv_dim", "quantization_config", "expert_dtype", "block_size"),
    )
)
"""Further keys that the reader knows as sizes."""

NO_SIZES = re.compile(
    r"token|position|rope|rotary|output_|chunk|beam|ngram|return_seq|pruned|label|quant|vision|image|audio|video|mtp|nextn"
    r"|ep_size|pretraining|n_group|topk_group|expert_group|num_groups|router_|routed_|topk_method|loss|capacity|init|logits"
    r"|hash|theta|cls|window_layers|max_|min_|top_k$|index_share|index_skip|index_block|index_topk_blocks|index_local"
    r"|unpadded|alpha_factor|beta_factor|dtype|auto_map|parallel|architectures|dropout|parameters|swiglu|temperature|limit"
)
"""Words in keys that change no size of a layer."""

SIZE_WORDS = re.compile(
    r"(size|dim|rank|heads?|width|experts?|expert_num|layers?|groups?|types?|freq|interval|step|period|offset|pattern|kernel"
    r"|expand|state|enum|ratios?|config|blocks?)$|^(num|n|moe|linear|mamba|ssm)_|_per_layer"
)
"""Words in keys that usually tell a size."""

QUANTISED = {"quantization_config", "quantization", "compression_config"}
"""Keys of the ways of quantisation, `quantization` in modelopt's own file."""


@dataclass(frozen=True)
class Config:
    """A config file: its nested parts, the one with the experts first, so that outer ones fill the gaps."""

    path: Path
    parts: tuple[dict, ...]

    def get(self, *names: str) -> object:
        """The value of the first of `names` that is there and not null, in the innermost part that has any."""
        return next((part[name] for part in self.parts for name in names if part.get(name) is not None), None)

    def outermost(self, name: str) -> object:
        """The value of the outermost part that has the key: of a multimodal model, that of the whole rules."""
        return next((part[name] for part in reversed(self.parts) if part.get(name) is not None), None)

    @property
    def model_type(self) -> str:
        """As the innermost part that states it has it."""
        return str(self.get("model_type") or "")

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

    def layers(self, name: str) -> set[int] | None:
        """Numbers of layers: a list, or text of numbers with commas or blanks between them (Step3), also in brackets."""
        listed = self.get(name)
        if isinstance(listed, str) and re.fullmatch(r"[\[(]?[\d\s,;]*[\])]?", listed.strip()):
            listed = [int(number) for number in re.findall(r"\d+", listed)]
        if listed is not None and not (isinstance(listed, list) and all(type(layer) is int for layer in listed)):
            raise self.fault(f"must be a list of layers, not {quoted(listed)}", (name,))
        return None if listed is None else set(listed)

    def one_per_layer(self, layers: int, *names: str) -> list | None:
        """A list that must reach at least as far as the layers (entries for prediction layers may follow)."""
        entries = self.get(*names)
        if entries is not None and (not isinstance(entries, list) or len(entries) < layers):
            raise self.fault("must be a list with one entry per layer", names)
        return entries

    def unknown_sizes(self) -> list[str]:
        """Keys next to the experts that look like sizes and that no table of this reader has."""
        return sorted(
            key
            for key, value in self.parts[0].items()
            if key not in KNOWN
            and ((type(value) is int and value > 1) or (isinstance(value, list | dict) and value))
            and SIZE_WORDS.search(key)
            and not NO_SIZES.search(key)
        )

    def fault(self, text: str, names: tuple[str, ...], value: object = None) -> InputError:
        """An InputError that names the key in use."""
        key = next((name for part in self.parts for name in names if part.get(name) is not None), names[0])
        return fault(self.path, text + (f" ({quoted(value)})" if value is not None else ""), key)


KNOWN = OTHER_SIZES.union(
    *NAMES.values(), EXPERT_WIDTHS, ZERO_EXPERTS, HEADS, KV_HEADS, DENSE_WIDTHS, SHARED_COUNTS, SHARED_WIDTHS
)


def config_of(data: dict, path: Path) -> Config:
    """The part of a parsed `config.json` that has experts, then the parts around it. Raises InputError without experts.

    A `hf_quant_config.json` beside it says how weights are quantised where the config does not (modelopt writes both).
    """
    beside = path.with_name(path.name.removesuffix("config.json") + "hf_quant_config.json")
    if path.name.endswith("config.json") and not QUANTISED & data.keys() and beside.is_file():
        data = data | {"quantization": read_json_object(beside).get("quantization")}
    for way in LANGUAGE_PARTS:
        parts = [data]
        for key in way:
            parts.append(parts[-1].get(key) if isinstance(parts[-1], dict) else None)
        if not all(isinstance(part, dict) for part in parts):
            continue
        counts = [parts[-1].get(name) for name in NAMES["experts"]]
        if any(count not in (None, 0, 1) for count in counts):
            return Config(path, tuple(reversed(parts)))
    raise fault(path, f"is not an MoE model: no field for the number of experts ({', '.join(NAMES['experts'])}) above 1")


KINDS = {
    "attention": "full",
    "full_attention": "full",
    "global_attention": "full",
    "deepseek_sparse_attention": "full",
    "indexed_attention": "full",
    "sliding_attention": "sliding",
    "sliding_window": "sliding",
    "swa": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
    "lightning_attention": "linear",
    "recurrent": "linear",
    "mamba": "mamba",
    "mamba2": "mamba",
    "conv": "conv",
    "moe": "none",
    "mlp": "none",
}
"""Mixers by their names in lists of one entry per layer. `none`: a block of an FFN alone."""

MARKS = {"E": "moe", "*": "attention", "M": "mamba", "-": "mlp"}
"""Blocks of `hybrid_override_pattern` (Nemotron-H)."""

MAMBA_TYPES = ("nemotron_h", "granitemoehybrid", "jamba", "bamba", "zamba")
"""Families whose `linear_attention` is Mamba: transformers 5 renames its blocks so."""


def blocks_of(config: Config) -> list[str] | None:
    """The kind of every block of a hybrid model in which an MoE layer is a block of its own (Nemotron-H)."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [MARKS.get(mark, mark) for mark in pattern]
    blocks = config.get("layers_block_type", "layer_types")
    return blocks if isinstance(blocks, list) and "moe" in blocks else None


def layers_with_experts(config: Config, layers: int, blocks: list[str] | None) -> set[int]:
    """The decoder layers that are MoE layers: every rule that the config states must say so."""
    if blocks is not None:
        return {layer for layer in range(layers) if blocks[layer] == "moe"}
    if (kinds := config.one_per_layer(layers, "mlp_layer_types")) is not None:
        return {layer for layer in range(layers) if kinds[layer] not in ("dense", "mlp")}
    if (kinds := config.one_per_layer(layers, "is_moe_layer", "is_moe_layers")) is not None:
        return {layer for layer in range(layers) if kinds[layer]}
    for name in ("moe_layers_enum", "moe_layers", "moe_layer_ids"):
        if (listed := config.layers(name)) is not None:
            return _within(listed, layers)

    def number(name: str, default: int, least: int = 0) -> int:
        value = config.number(name, (name,), least)
        return default if value is None else value

    last = number("moe_layer_end_index", -1, least=-1)
    first = max(number("first_k_dense_replace", 0), number("num_dense_layers", 0), number("moe_layer_start_index", 0))
    steps = (*("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"),)
    every = [number(name, 1, least=1) for name in steps]
    period, offset = number("expert_layer_period", 1, least=1), number("expert_layer_offset", 0)
    chosen = {
        layer
        for layer in range(first, layers if last == -1 else min(layers, last + 1))
        if all((layer + 1) % step == 0 for step in every) and layer % period == offset
    }
    if isinstance(config.get("moe_layer_freq"), list):
        listed = config.one_per_layer(layers, "moe_layer_freq")
        chosen &= {layer for layer in range(layers) if listed[layer]}
    else:
        step = number("moe_layer_freq", 1, least=1)
        chosen = {layer for layer in chosen if layer % step == 0}
    return chosen - (config.layers("mlp_only_layers") or set())


def mixers_of(config: Config, layers: int, blocks: list[str] | None) -> list[str]:
    """The mixer of every layer: full, sliding, linear, mamba, conv or none. Raises InputError for kinds that are not known."""
    if blocks is not None:
        return _kinds(config, blocks, "hybrid_override_pattern", "layers_block_type", "layer_types")
    names = ("layer_types", "layers_block_type", "attention_types")
    if (listed := config.one_per_layer(layers, *names)) is not None:
        return _kinds(config, listed[:layers], *names)
    if (listed := config.one_per_layer(layers, "hybrid_layer_pattern")) is not None:
        return ["sliding" if entry in (1, "sliding_attention") else "full" for entry in listed[:layers]]
    if (listed := config.one_per_layer(layers, "attn_type_list")) is not None:  # MiniMax: 0 is lightning attention
        return ["full" if entry else "linear" for entry in listed[:layers]]
    if (period := config.number("attn_layer_period", ("attn_layer_period",))) is not None:  # Jamba
        offset = config.number("attn_layer_offset", ("attn_layer_offset",), least=0) or 0
        return ["full" if layer % period == offset else "mamba" for layer in range(layers)]
    if (listed := config.layers("full_attn_idxs")) is not None:  # LFM2
        return ["full" if layer in listed else "conv" for layer in range(layers)]
    if (period := config.number("full_attention_interval", ("full_attention_interval",))) is not None:  # Qwen3-Next
        return ["full" if (layer + 1) % period == 0 else "linear" for layer in range(layers)]
    if (period := config.number("layer_group_size", ("layer_group_size",))) is not None:  # Ring-linear: so in each group, and
        rest = layers // period * period  # those after the last whole group
        return ["full" if (layer + 1) % period == 0 or layer >= rest else "linear" for layer in range(layers)]
    return ["full"] * layers


def _kinds(config: Config, listed: Iterable[object], *names: str) -> list[str]:
    kinds = []
    for entry in listed:
        if (kind := KINDS.get(re.sub(r"\W", "_", str(entry).lower()))) is None:
            raise config.fault(f"has layers of {quoted(entry)}, which Switchyard does not know", names)
        mamba = kind == "linear" and config.model_type.startswith(MAMBA_TYPES)
        kinds.append("mamba" if mamba else kind)
    return kinds


def _within(listed: set[int], layers: int) -> set[int]:
    return {layer for layer in listed if 0 <= layer < layers}
