"""Hugging Face `config.json` of MoE models: one reader that knows the keys that change a size, or names the one it does not.
Here the MoE model of a config: layers, experts, widths and number formats."""

import contextlib
import re
from pathlib import Path

from engine.cluster import BITS_PER_DTYPE
from engine.errors import InputError
from engine.formats.format import Format
from engine.formats.huggingface.attention import kv_numbers_of, sizes_of_config
from engine.formats.huggingface.config import (
    CHOSEN_GROUPS,
    EXPERT_WIDTHS,
    GROUPS,
    NAMES,
    SHARED_COUNTS,
    SHARED_WIDTHS,
    TELLING_KEYS,
    ZERO_EXPERTS,
    Config,
    blocks_of,
    config_of,
    layers_with_experts,
    mixers_of,
)
from engine.formats.huggingface.number_formats import number_formats
from engine.formats.source import quoted
from engine.model import MoEModel

PLAIN_ACTIVATIONS = ("relu2", "relu")
"""`mlp_hidden_act` of FFNs of two matrices (Nemotron-H)."""

BIASED = ("gpt_oss", "openai_privacy_filter")
"""Families whose experts have a bias behind every matrix, which no key states."""

NOT_PLANNED = {"jetmoe": "its attention is split into experts as well"}
"""Families whose dispatch is not the one of MoE layers, and why."""


def model_of_config(data: dict, path: Path) -> MoEModel:
    """The model that a parsed `config.json` describes; raises InputError if it has no experts, lacks a size, or has a way of
    quantisation that is not known.

    `batch` and `sequence_length` are no part of a config and keep their defaults.
    """
    config = config_of(data, path)
    if (reason := NOT_PLANNED.get(config.model_type)) is not None:
        raise config.fault(f"{quoted(config.model_type)} cannot be planned: {reason}", ("model_type",))
    for name in config.unknown_sizes():
        if re.search("expert|moe|dense|^block_configs$", name):
            raise config.fault(
                "looks like a size of the experts that Switchyard does not know; remove it to go without", (name,)
            )
    if re.search("expert|moe|intermediate", str(config.get("per_layer_config"))):
        raise config.fault("gives layers experts of their own, which Switchyard cannot plan", ("per_layer_config",))
    blocks = blocks_of(config)
    sizes = {} if blocks is None else {"layers": len(blocks)}
    for field in (field for field in NAMES if field not in sizes):
        sizes[field] = config.needed(field, NAMES[field])
    layers = sizes["layers"]
    with_experts = layers_with_experts(config, layers, blocks)
    plain = config.get("mlp_hidden_act") in PLAIN_ACTIVATIONS or config.get("gated_linear_unit") is False
    matrices = 2 if plain else 3
    formats = number_formats(config, layers, with_experts, matrices=matrices)
    bits = formats.bits["experts"]
    width = config.number("expert_width", EXPERT_WIDTHS)
    width = None if width == sizes["d_model"] else width
    shared, shared_d_ff = _shared_experts(config, sizes["d_ff"])
    biases = (matrices - 1) * sizes["d_ff"] + (width or sizes["d_model"]) if config.model_type in BIASED else None
    kv_numbers = attention_layers = None  # which are not known of attention of other kinds
    with contextlib.suppress(InputError):
        mixers = mixers_of(config, layers, blocks)
        attention_layers = sum(mixer in ("full", "sliding") for mixer in mixers)
        kv_numbers = kv_numbers_of(config, mixers, sizes["d_model"])
    return MoEModel.from_dict(
        {
            "name": _name(config),
            **sizes,
            "dense_layers": tuple(layer for layer in range(layers) if layer not in with_experts),
            "ffn_matrices": matrices,
            "expert_width": width,
            "expert_biases": biases,
            "zero_experts": config.number("zero_experts", ZERO_EXPERTS, least=0) or None,
            "expert_groups": _groups(config, sizes["experts"]),
            "shared_experts": shared,
            "shared_d_ff": shared_d_ff,
            "dtype": formats.dtype,
            "expert_bits": None if bits == BITS_PER_DTYPE[formats.dtype] else bits,
            "kv_numbers": kv_numbers,
            "attention_layers": None if attention_layers == layers else attention_layers,
        },
        path.name,
    )


def _shared_experts(config: Config, d_ff: int) -> tuple[int, int | None]:
    """Shared experts and the inner width of one, None where it is that of a routed one. A width that a config gives is that of
    all of them together; one that is a multiple of the routed width counts as so many experts. So does a dense FFN beside the
    experts (Grok-2, Gemma 4, and Arctic, whose is as wide as the model)."""
    count = config.number("shared_experts", SHARED_COUNTS, least=0)
    beside = (
        NAMES["d_model"] if config.model_type == "arctic" and config.get("use_residual") is True else ("intermediate_size",)
    )
    dense = beside[0] != "intermediate_size" or config.get("residual_moe", "enable_moe_block") is True
    if width := config.number("shared expert width", beside if dense else SHARED_WIDTHS, least=0):
        if width % d_ff == 0:
            return width // d_ff, None
        return (count, width // count) if count and width % count == 0 else (1, width)
    if count is not None:
        return count, None
    # Llama 4 and Hunyuan say it by their type or a switch: one, as wide as a routed expert.
    always = config.model_type.startswith("llama4") or config.get("use_mixed_mlp_moe") is True
    return (1 if always else 0), None


def _groups(config: Config, experts: int) -> int | None:
    """Groups of group-limited routing, where a token chooses fewer than all."""
    groups = config.number("groups", GROUPS, least=0) or 0
    chosen = config.number("chosen groups", CHOSEN_GROUPS, least=0) or groups
    return groups if groups > 1 and chosen < groups and experts % groups == 0 else None


def _name(config: Config) -> str:
    """The checkpoint's name, else the file's unless that is the usual `config`, else the family."""
    checkpoint = str(config.parts[-1].get("_name_or_path") or "").rstrip("/").rpartition("/")[2]
    stem = "" if config.path.stem.lower() == "config" else config.path.stem
    return (checkpoint or stem or str(config.parts[-1].get("model_type") or "model"))[:80]


FORMATS = (Format("huggingface", "a Hugging Face config.json", "model", lambda glance: len(TELLING_KEYS & glance.keys) > 1),)
