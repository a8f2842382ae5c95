"""A Hugging Face `config.json`, or Mistral's `params.json`: its nested parts, its keys, and its layers: which have experts, and
of which kind the attention or other mixer of each is. Families name the same size differently; the tables list the names as
transformers 5 and the families' own files have them, most specific first."""

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.formats.source import fault, quoted, read_json_object

TELLING_KEYS = {
    *("model_type", "architectures", "num_hidden_layers", "hidden_size", "transformers_version", "dim", "n_layers"),
    *("producer", "quantization"),
}
"""Keys that no MoEModel of ours has; the last two are of modelopt's list of number formats, which is no model."""

LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "language_model", "thinker_config")
"""Places of the language model in a multimodal config, before others such as that of a model that talks."""

OWN_PARTS = ("ffn_config", "moe_config", "moe", "attn_config")
"""Parts of the language model itself, in which DBRX, Yuan and Mistral keep experts or heads."""

OTHER_PARTS = re.compile("vision|visual|image|audio|speech|draft|specul|quant|mtp|nextn|rope|projector|compression")
"""Words in keys of parts that are no language model."""

NAMES = {
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_moe_experts"),
    "experts_per_token": (
        *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
        *("experts_per_token", "num_selected_experts", "num_activated_experts", "n_activated_experts", "moe_router_topk"),
    ),
    "d_model": ("hidden_size", "d_model", "dim"),
    "d_ff": (
        *("moe_intermediate_size", "expert_ffn_hidden_size", "expert_hidden_dim", "moe_inter_dim", "moe_ffn_hidden_size"),
        *("intermediate_size", "ffn_hidden_size", "hidden_dim"),
    ),
    "layers": ("num_hidden_layers", "num_layers", "n_layers"),
}
EXPERT_WIDTHS = ("moe_latent_size", "routed_expert_hidden_size", "moe_hidden_size")
ZERO_EXPERTS = ("zero_expert_num",)
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "n_kv_heads", "num_attention_groups", "num_query_groups")
HEAD_SIZES = ("head_dim", "attention_head_dim", "kv_channels")
GROUPS = ("n_group", "num_expert_group", "num_expert_groups", "n_expert_groups")
CHOSEN_GROUPS = ("topk_group", "num_limited_groups", "num_expert_groups_per_tok", "n_limited_groups")
DENSE_WIDTHS = (
    *("dense_intermediate_size", "intermediate_size_mlp", "mlp_intermediate_size", "intermediate_size", "ffn_hidden_size"),
    *("inter_dim", "hidden_dim"),
)
FIRST_DENSE = (
    *("first_k_dense_replace", "num_dense_layers", "n_dense_layers", "moe_layer_start_index", "moe_layer_num_skipped"),
    *("n_dense_first_layers", "dense_mlp_idx"),
)
EVERY = ("decoder_sparse_step", "moe_layer_interval", "moe_layer_frequency", "interleave_moe_layer_step", "moe_expert_interval")
PERIODS = {"expert_layer_period": "expert_layer_offset", "moe_every_n_layer": "moe_layer_offset"}
"""Periods of MoE layers, and the layer with which each begins."""
SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
SHARED_WIDTHS = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"),
    *("shared_intermediate_size", "share_expert_dim"),
)

OTHER_SIZES = frozenset(
    (
        *("v_head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "index_topk"),
        *("index_n_heads", "index_head_dim", "index_topk_freq", "indexer_types", "index_skip_topk_offset", "vocab_size"),
        *("sliding_window", "sliding_window_size", "attention_chunk_size", "sliding_window_pattern"),
        *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
        *("num_sliding_attention_heads", "num_attention_heads_per_layer", "global_attn_every_n_layers"),
        *("prefix_dense_sliding_window_pattern", "layer_types", "layers_block_type", "mlp_layer_types", "attention_types"),
        *("hybrid_layer_pattern", "attn_type_list", "hybrid_override_pattern", "full_attention_interval", "layer_group_size"),
        *("attn_layer_period", "attn_layer_offset", "full_attn_idxs", "is_moe_layer", "is_moe_layers", "moe_layers_enum"),
        *("moe_layers", "moe_layer_ids", "moe_layer_indices", "moe_layer_end_index", "moe_layer_freq", "route_every_n"),
        *("no_rope_layers", "no_rope_layer_interval", "linear_attn_config", "attention_other_setting", "linear_head_dim"),
        *("linear_num_heads", "group_norm_size", "global_attn_every_n", "mlp_only_layers", "linear_num_value_heads"),
        *("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "ssm_state_size"),
        *("mamba_d_state", "conv_kernel", "mamba_d_conv", "expand", "mamba_expand", "mamba_num_heads", "mamba_n_heads"),
        *("mamba_head_dim", "mamba_d_head", "n_groups", "mamba_n_groups", "mamba_dt_rank", "conv_L_cache", "conv_dim"),
        *("short_conv_kernel_size", "expert_dtype", "block_size", "global_head_dim", "num_global_key_value_heads"),
        *("vocab_size_per_layer_input", "per_layer_config", "sparse_attention_config"),
    )
)
"""Further keys that the reader knows as sizes."""

NO_SIZES = re.compile(
    r"token|position|rope|rotary|output_|chunk|beam|ngram|return_seq|pruned|label|quant|vision|image|audio|video|mtp|nextn"
    r"|ep_size|pretraining|num_groups|router_|routed_scal|topk_method|loss|capacity|init|logits|hash|theta|cls|window_layers"
    r"|max_|min_|top_k$|index_share|index_skip|index_block|index_topk_blocks|index_local|unpadded|alpha_factor|beta_factor"
    r"|dtype|auto_map|parallel|architectures|dropout|parameters|swiglu|temperature|limit"
)
"""Words in keys that change no size of a layer."""

SIZE_WORDS = re.compile(
    r"(size|dim|rank|heads?|width|experts?|expert_num|layers?|groups?|types?|freq|interval|step|period|offset|pattern|kernel"
    r"|expand|state|enum|ratios?|configs?|settings?|blocks?|idxs?|indices|_ids)$"
    r"|^(num|n|moe|linear|mamba|ssm)_|_per_layer|expert|moe|dense"
)
"""Words in keys that usually tell a size."""

QUANTISED = ("quantization_config", "compression_config", "quantization", "hf_quant_config")
"""Keys of the ways of quantisation: `quantization` in modelopt's own file, which some configs hold whole, and Mistral's."""


BESIDE = ("hf_quant_config.json", "quant_model_description.json")


@dataclass(frozen=True)
class Config:
    """A config file: its nested parts, the one with the experts first, so that outer ones fill the gaps.

    own: how many of the parts are the language model's
    """

    path: Path
    parts: tuple[dict, ...]
    own: int = 1

    def get(self, *names: str) -> object:
        """The value of the first of `names` that is there and not null, in the innermost part that has any."""
        return next((part[name] for part in self.parts for name in names if part.get(name) is not None), None)

    def outermost(self, *names: str) -> object:
        """The value of the outermost part that has one of the keys: of a multimodal model, that of the whole rules."""
        found = (part[name] for part in reversed(self.parts) for name in names if part.get(name) is not None)
        return next(found, None)

    @property
    def model_type(self) -> str:
        """As the innermost part that states it has it."""
        return str(self.get("model_type") or "")

    def number(self, field: str, names: tuple[str, ...], least: int = 1) -> int | None:
        """A whole number; a list with one entry per layer counts when its entries are equal. None of false, which stands for
        null in some families."""
        value = self.get(*names)
        if isinstance(value, list) and value:
            if any(entry != value[0] for entry in value):
                raise self.fault(f"{field} differs from layer to layer, which Switchyard cannot plan", names, value)
            layers = self.get(*NAMES["layers"])
            if len(value) > 1 and type(layers) is int and len(value) < layers:
                raise self.fault(f"has {len(value)} entries for {layers} layers, which Switchyard does not know", names, value)
            value = value[0]
        if value is False:
            return None
        if value is not None and (type(value) is not int or value < least):
            raise self.fault(f"must be a whole number of at least {least}, not {quoted(value)}", names)
        return value

    def needed(self, field: str, names: tuple[str, ...]) -> int:
        """As `number`, which must be there, and of which two names in one part must not say two things."""
        said = {name: self.parts[0][name] for name in names if type(self.parts[0].get(name)) is int}
        if field.startswith("experts") and len({*said.values()}) > 1:
            text = " and ".join(f"{name} {value}" for name, value in said.items())
            raise fault(self.path, f"says {text}; leave the one that holds")
        if (number := self.number(field, names)) is None:
            raise fault(self.path, f"{field} is missing; none of {', '.join(names)} is there")
        # Beyond this MoEModel refuses anyway; checked here because one entry per layer is made next.
        if field == "layers" and number > 1000:
            raise fault(self.path, f"{number} layers are too many (at most 1000)")
        return number

    def layers(self, name: str) -> set[int] | None:
        """Numbers of layers: a list, or text of them (see `listed`)."""
        numbers = listed(self.get(name))
        if numbers is not None and not (isinstance(numbers, list) and all(type(layer) is int for layer in numbers)):
            raise self.fault(f"must be a list of layers, not {quoted(numbers)}", (name,))
        return None if numbers is None else set(numbers)

    def one_per_layer(self, layers: int, *names: str) -> list | None:
        """A list that must reach at least as far as the layers (entries for prediction layers may follow), text of it, or an
        object with the layers' numbers as keys."""
        entries = listed(self.get(*names))
        if isinstance(entries, dict) and {str(layer) for layer in range(layers)} <= entries.keys():
            entries = [entries[str(layer)] for layer in range(layers)]
        if entries is not None and (not isinstance(entries, list) or len(entries) < layers):
            raise self.fault("must be a list with one entry per layer", names)
        return entries

    def unknown_sizes(self) -> list[str]:
        """Keys of the language model that look like sizes and that no table of this reader has."""
        return sorted(
            key
            for part in self.parts[: self.own]
            for key, value in part.items()
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
    *(*NAMES.values(), EXPERT_WIDTHS, ZERO_EXPERTS, HEADS, KV_HEADS, HEAD_SIZES, DENSE_WIDTHS, SHARED_COUNTS, SHARED_WIDTHS),
    *(GROUPS, CHOSEN_GROUPS, FIRST_DENSE, EVERY, PERIODS, PERIODS.values(), LANGUAGE_PARTS, OWN_PARTS, QUANTISED),
)


def listed(value: object) -> object:
    """The list in a text: numbers with commas or blanks between them, also in brackets (Step3), ranges with a hyphen (both ends
    are meant), JSON, or lists that are repeated and joined as Megatron writes them, `([0]*3+[1]*58)`. Texts of whole numbers in
    a list become numbers. Anything else comes back as it is.
    """
    if isinstance(value, list):
        return [int(entry) if isinstance(entry, str) and re.fullmatch(r"\s*\d{1,4}\s*", entry) else entry for entry in value]
    if not isinstance(value, str) or len(value) > 20_000:
        return value
    text = value.strip()
    tokens = re.sub(r"\s*-\s*", "-", text.strip("[]() ")).replace(",", " ").replace(";", " ").split()
    found = [re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", token) for token in tokens]
    if all(found) and all(int(each[2] or each[1]) >= int(each[1]) for each in found):
        return [number for each in found for number in range(int(each[1]), min(int(each[2] or each[1]), 1000) + 1)]
    if re.fullmatch(r"\(?\[[\d,\s]*\](\s*\*\s*\d{1,3})?(\s*\+\s*\[[\d,\s]*\](\s*\*\s*\d{1,3})?)*\)?", text):
        lists = re.findall(r"\[([\d,\s]*)\](?:\s*\*\s*(\d+))?", text)
        return [int(entry) for entries, times in lists for entry in re.findall(r"\d+", entries) * int(times or 1)]
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(text)
        return parsed if isinstance(parsed, list | dict) else value
    return value


def config_of(data: dict, path: Path) -> Config:
    """The part of a parsed `config.json` that has experts, then the parts around it. Raises InputError without experts.

    A file beside it says how weights are quantised where the config does not: of modelopt, which writes both, or of ModelSlim.
    """
    if path.name.endswith("config.json") and data.keys().isdisjoint(QUANTISED):
        beside = [path.with_name(path.name.removesuffix("config.json") + name) for name in BESIDE]
        if beside[0].is_file():
            data = data | {"quantization": read_json_object(beside[0]).get("quantization")}
        elif beside[1].is_file():
            formats = {name: kind for name, kind in read_json_object(beside[1]).items() if name.endswith(".weight")}
            own = {name.removesuffix(".weight"): kind for name, kind in formats.items() if kind != "FLOAT"}
            data = data | ({"quantization": {"quantized_layers": own}} if own else {})
    if (found := _with_experts(data)) is None:
        if "producer" in data:
            raise fault(path, "is modelopt's list of number formats; keep it beside the model's config.json, and open that")
        raise fault(path, f"is not an MoE model: no field for the number of experts ({', '.join(NAMES['experts'])}) above 1")
    parts, own = found[::-1], 1
    while own < len(parts) and any(parts[own].get(key) is parts[own - 1] for key in OWN_PARTS):
        own += 1
    attention = parts[own - 1].get("attn_config")
    return Config(path, (attention, *parts) if isinstance(attention, dict) else tuple(parts), own + isinstance(attention, dict))


def _with_experts(part: dict, depth: int = 0) -> list[dict] | None:
    """The parts from this one down to the one that counts experts."""
    nested = [key for key, inner in part.items() if isinstance(inner, dict) and not OTHER_PARTS.search(key)]
    for key in sorted(nested, key=lambda key: (key not in LANGUAGE_PARTS, key)) if depth < 4 else ():
        if (found := _with_experts(part[key], depth + 1)) is not None:
            return [part, *found]
    return [part] if any(part.get(name) not in (None, False, 0, 1) for name in NAMES["experts"]) else None


KINDS = {
    "attention": "full",
    "full_attention": "full",
    "global_attention": "full",
    "deepseek_sparse_attention": "full",
    "indexed_attention": "full",
    "minimax_m3_sparse": "full",
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

WINDOWS_EVERYWHERE = ("mixtral", "phimoe", "qwen3_moe")
"""Families whose `sliding_window`, if it is there, is that of all layers with attention."""

MAMBA_TYPES = ("nemotron_h", "granitemoehybrid", "jamba", "bamba", "zamba")
"""Families whose `linear_attention` is Mamba: transformers 5 renames its blocks so."""


def blocks_of(config: Config) -> list[str] | None:
    """The kind of every block of a hybrid model in which an MoE layer is a block of its own (Nemotron-H)."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        pattern = pattern.replace("|", "")  # where a pipeline is cut
        if other := sorted(set(pattern) - MARKS.keys()):
            raise config.fault(f"has {quoted(other[0])}, which Switchyard does not know", ("hybrid_override_pattern",))
        if config.number("layers", NAMES["layers"]) not in (None, len(pattern)):
            raise config.fault(
                f"has {len(pattern)} blocks, and the config another number of layers", ("hybrid_override_pattern",)
            )
        return [MARKS[mark] for mark in pattern]
    blocks = listed(config.get("layers_block_type", "layer_types"))
    return blocks if isinstance(blocks, list) and "moe" in blocks else None


def layers_with_experts(config: Config, layers: int, blocks: list[str] | None) -> set[int]:
    """The decoder layers that are MoE layers: every rule that the config states must say so."""
    if blocks is not None:
        return {layer for layer in range(layers) if blocks[layer] == "moe"}
    if (kinds := config.one_per_layer(layers, "mlp_layer_types")) is not None:
        if other := [kind for kind in kinds if kind not in (known := ("dense", "mlp", "sparse", "moe", "hash_moe"))]:
            raise config.fault(f"has entries other than {', '.join(known)}", ("mlp_layer_types",), other[0])
        return {layer for layer in range(layers) if kinds[layer] not in ("dense", "mlp")}
    if (kinds := config.one_per_layer(layers, "is_moe_layer", "is_moe_layers")) is not None:
        return {layer for layer in range(layers) if kinds[layer]}
    for name in ("moe_layers_enum", "moe_layers", "moe_layer_ids", "moe_layer_indices"):
        if found := config.layers(name):  # an empty one says nothing (Llama 4)
            return {layer for layer in found if 0 <= layer < layers}

    def number(name: str, default: int, least: int = 0) -> int:
        value = config.number(name, (name,), least)
        return default if value is None else value

    last = number("moe_layer_end_index", -1, least=-1)
    first = max(number(name, 0) for name in FIRST_DENSE)
    every = [number(name, 1, least=1) for name in EVERY]
    chosen = {
        layer
        for layer in range(first, layers if last == -1 else min(layers, last + 1))
        if all((layer + 1) % step == 0 for step in every)
    }
    for period, offset in PERIODS.items():
        step, begin = number(period, 1, least=1), number(offset, 0)
        chosen = {layer for layer in chosen if layer >= begin and (layer - begin) % step == 0}
    for name in ("moe_layer_freq", "route_every_n"):
        if isinstance(config.get(name), int | None):
            step = number(name, 1, least=1)
            chosen = {layer for layer in chosen if layer % step == 0}
        else:
            flags = config.one_per_layer(layers, name)
            chosen &= {layer for layer in range(layers) if flags[layer]}
    return chosen - (config.layers("mlp_only_layers") or set())


def mixers_of(config: Config, layers: int, blocks: list[str] | None) -> list[str]:
    """The mixer of every layer: full, sliding, linear, mamba, conv or none. Raises InputError for kinds that are not known."""
    if blocks is not None:
        return _kinds(config, blocks, "hybrid_override_pattern", "layers_block_type", "layer_types")
    names = ("layer_types", "layers_block_type", "attention_types")
    if (found := config.one_per_layer(layers, *names)) is not None:
        return _kinds(config, found[:layers], *names)
    if (found := config.one_per_layer(layers, "hybrid_layer_pattern")) is not None:
        return ["sliding" if entry in (1, "sliding_attention") else "full" for entry in found[:layers]]
    if (found := config.one_per_layer(layers, "attn_type_list")) is not None:  # MiniMax: 0 is lightning attention
        return ["full" if entry else "linear" for entry in found[:layers]]
    if isinstance(linear := config.get("linear_attn_config"), dict):
        return _split(config, layers, linear)
    if (period := config.number("attn_layer_period", ("attn_layer_period",))) is not None:  # Jamba
        offset = config.number("attn_layer_offset", ("attn_layer_offset",), least=0) or 0
        return ["full" if layer % period == offset else "mamba" for layer in range(layers)]
    if (found := config.layers("full_attn_idxs")) is not None:  # LFM2
        return ["full" if layer in found else "conv" for layer in range(layers)]
    if (period := config.number("full_attention_interval", ("full_attention_interval",))) is not None:  # Qwen3-Next
        return ["full" if (layer + 1) % period == 0 else "linear" for layer in range(layers)]
    if (period := config.number("layer_group_size", ("layer_group_size",))) is not None:  # Ring-linear: so in each group, and
        rest = layers // period * period  # those after the last whole group
        return ["full" if (layer + 1) % period == 0 or layer >= rest else "linear" for layer in range(layers)]
    return _with_windows(config, layers)


def _split(config: Config, layers: int, linear: dict) -> list[str]:
    """Mixers by two lists of layers, which count from 1 (Kimi) or from 0 (GLM)."""
    lists = [linear.get(key) for key in ("full_attn_layers", "kda_layers")]
    full, state = ({each for each in found if type(each) is int} if isinstance(found, list) else None for found in lists)
    for first in (1, 0):
        if full is not None and state is not None and not full & state and full | state == {*range(first, layers + first)}:
            return ["full" if layer + first in full else "linear" for layer in range(layers)]
    raise config.fault("needs full_attn_layers and kda_layers with every layer in one of them", ("linear_attn_config",))


def _with_windows(config: Config, layers: int) -> list[str]:
    """Full attention, with a sliding window where a rule that is no list says so."""
    if config.model_type.startswith("llama4"):  # chunks in the layers with rotary positions
        period = config.number("interval", ("no_rope_layer_interval",)) or 4
        rotary = config.get("no_rope_layers") or [(layer + 1) % period for layer in range(layers)]
        if not isinstance(rotary, list) or len(rotary) < layers:
            raise config.fault("must be a list with one entry per layer", ("no_rope_layers",))
        return ["sliding" if entry else "full" for entry in rotary[:layers]]
    pattern = config.get("sliding_window_pattern", "global_attn_every_n_layers")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:  # EXAONE; its last layer is global
        return ["sliding" if pattern[layer % len(pattern)] == "L" and layer < layers - 1 else "full" for layer in range(layers)]
    if pattern is not None:
        period = config.number("period", ("sliding_window_pattern", "global_attn_every_n_layers"))
        return ["sliding" if (layer + 1) % period else "full" for layer in range(layers)]
    if config.model_type == "gpt_oss":
        return ["full" if layer % 2 else "sliding" for layer in range(layers)]
    window, family = config.get("sliding_window"), config.model_type
    if type(window) is not int or window <= 0 or config.get("use_sliding_window") is False:
        return ["full"] * layers
    most, last = config.get("max_position_embeddings"), config.number("window_layers", ("max_window_layers",), least=0)
    if family in WINDOWS_EVERYWHERE or (type(most) is int and window >= most):
        return ["sliding"] * layers
    if family == "qwen2_moe" and last is not None:
        return ["full" if layer % 2 or layer >= last else "sliding" for layer in range(layers)]
    if family == "dots1" and last is not None:
        return ["full" if layer < last else "sliding" for layer in range(layers)]
    raise config.fault("is there, and no key lists the layers that have it", ("sliding_window",))


def _kinds(config: Config, entries: Iterable[object], *names: str) -> list[str]:
    kinds = []
    for entry in entries:
        if (kind := KINDS.get(re.sub(r"\W", "_", str(entry).lower()))) is None:
            raise config.fault(f"has layers of {quoted(entry)}, which Switchyard does not know", names)
        mamba = kind == "linear" and config.model_type.startswith(MAMBA_TYPES)
        kinds.append("mamba" if mamba else kind)
    return kinds
