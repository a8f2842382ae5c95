"""Number formats of a checkpoint's weights, from `quantization_config` in all spellings, kind of matrix by kind of matrix."""

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.cluster import BITS_PER_DTYPE
from engine.formats.huggingface.config import QUANTISED, Config
from engine.formats.source import quoted

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
LEAST_SCALE = 0.01
"""Bits a weight below which scales are left out: one number for a block of 128 × 128 weights, a channel or a matrix."""

Part = Literal["experts", "shared", "dense", "attention"]
FFNS = ("mlp", "block_sparse_moe", "ffn", "feed_forward", "mixer", "moe", "mlp.text_moe")
MATRICES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "linear_fc1", "linear_fc2")
MIXERS = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer", "mamba")
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa"),
    *("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "in_proj", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
)
PREFIXES = ("model.layers", "layers", "model.language_model.layers", "language_model.model.layers", "backbone.layers")

ALGORITHMS: tuple[tuple[str, float, bool], ...] = (
    ("NVFP4_AWQ|NVFP4_SVDQUANT|W4A4|NVFP4", 4 + 8 / 16, True),
    ("W4A16_NVFP4|NVFP4_A16", 4 + 8 / 16, False),
    ("W4A8_NVFP4_FP8|W4A8_MXFP4_FP8|MXFP4_MXFP8", 4.25, True),
    ("W4A16_MXFP4|MXFP4", 4 + 8 / 32, False),
    ("MXFP6|MXFP6_E3M2|MXFP6_E2M3", 6 + 8 / 32, True),
    ("W4A8_AWQ", 4 + 16 / 128, True),
    ("W4A16_AWQ|INT4_AWQ|W4A16|INT4", 4 + 16 / 128, False),
    ("MXFP8", 8 + 8 / 32, True),
    ("FP8.*", 8, True),
    ("W8A16|INT8_WO", 8, False),
    ("W8A8_SQ.*|INT8.*|W8A8.*", 8, False),
)
"""Names of modelopt's algorithms, bits of a weight with its scales, and True where activations have 8 bits or fewer in the
format of floats. Activations of 8-bit integers count as 16 bits here: no catalogue has their rate."""


@dataclass(frozen=True)
class NumberFormat:
    """Bits of one weight with its scales, and True if activations are cast down to floats of 8 bits or fewer."""

    bits: float
    small_activations: bool = False


@dataclass(frozen=True)
class NumberFormats:
    """The formats of a checkpoint.

    dtype: of computation and of rows on the wire, a dtype of `MoEModel`
    bits: bits of one weight with its scales by part: experts, shared, dense, attention; the mean over layers
    """

    dtype: str
    bits: dict[Part, float]


def number_formats(config: Config, layers: int, moe_layers: Iterable[int], mixers: Sequence[str] = ()) -> NumberFormats:
    """Raises InputError for a way of quantisation that is not known, and names its key.

    layers: decoder layers
    moe_layers: those with experts
    mixers: the mixer of every layer, `none` where a layer is an FFN alone; empty: every layer has attention
    """
    plain = _plain_dtype(config)
    moe = set(moe_layers)
    where: dict[Part, list[int]] = {
        "experts": sorted(moe),
        "shared": sorted(moe),
        "dense": [layer for layer in range(layers) if layer not in moe],
        "attention": [layer for layer in range(layers) if not mixers or mixers[layer] != "none"],
    }
    whole = NumberFormat(float(BITS_PER_DTYPE[plain]), plain == "fp8")
    quantised = config.get(*sorted(QUANTISED))
    rule = _rule(config, quantised, whole) if isinstance(quantised, dict) else lambda part, layer: whole
    found = {part: [rule(part, layer) for layer in numbers] for part, numbers in where.items()}
    if (named := config.get("expert_dtype")) is not None:
        if (experts := _by_name(str(named))) is None:
            raise config.fault(f"is {quoted(named)}, which Switchyard does not know", ("expert_dtype",))
        if not any(format.bits < 8 for format in found["experts"]):
            found["experts"] = [NumberFormat(experts.bits, before.small_activations) for before in found["experts"]]
    bits = {part: sum(format.bits for format in each) / len(each) if each else whole.bits for part, each in found.items()}
    small = bool(found["experts"]) and all(format.small_activations for format in found["experts"])
    return NumberFormats("fp8" if small else "bf16" if plain == "fp8" else plain, bits)


def _plain_dtype(config: Config) -> str:
    dtype = config.get("dtype", "torch_dtype")
    if dtype is None:
        return "bf16"
    known = DTYPES.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise config.fault(f"is {quoted(dtype)}; known are {', '.join(DTYPES)}", ("dtype", "torch_dtype"))
    return known


LEFT_OUT = (*("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "exclude", "llm_int8_skip_modules"),)
"""Keys with modules that keep the plain format."""

Rule = Callable[[Part, int], NumberFormat]


def _rule(config: Config, quantised: dict, whole: NumberFormat) -> Rule:
    """The format of a part in a layer by the config's own lists."""
    skipped = [entry for name in LEFT_OUT for entry in _listed(config, quantised.get(name))]
    dynamic = [f"re:{entry[2:]}" for entry in _listed(config, quantised.get("dynamic")) if str(entry).startswith("-:")]
    left_out = _Patterns(config, [*skipped, *dynamic])
    named = _named_formats(config, quantised)
    if named:

        def of_names(part: Part, layer: int) -> NumberFormat:
            return next((format for patterns, format in named if patterns.reach(part, layer)), whole)

        return lambda part, layer: whole if left_out.reach(part, layer) else of_names(part, layer)
    base = _base_format(config, quantised)
    only_experts = quantised.get("quant_method") == "mxfp4"

    def by_part(part: Part, layer: int) -> NumberFormat:
        skipped = (only_experts and part != "experts") or left_out.reach(part, layer)
        return whole if skipped else base

    return by_part


def _listed(config: Config, entries: object) -> list:
    """The entries of a list, or the keys of an object; none of null. Raises InputError for anything else."""
    if entries is not None and not isinstance(entries, list | dict):
        raise config.fault(f"has {quoted(entries)} where modules are listed", tuple(sorted(QUANTISED)))
    return list(entries or ())


def _named_formats(config: Config, quantised: dict) -> list[tuple["_Patterns", NumberFormat]]:
    """Formats that a config gives to modules by their names; empty if it has one format for all linear modules."""
    if isinstance(listed := quantised.get("quantized_layers"), dict) and listed:
        by_format: dict[NumberFormat, list[str]] = {}
        for module, entry in listed.items():
            by_format.setdefault(_algorithm(config, entry.get("quant_algo") if isinstance(entry, dict) else entry), []).append(
                module
            )
        return [(_Patterns(config, modules), format) for format, modules in by_format.items()]
    groups = quantised.get("config_groups")
    if isinstance(groups, dict) and groups:
        found = []
        for group in groups.values():
            targets = group.get("targets", ["Linear"]) if isinstance(group, dict) else None
            if not isinstance(targets, list) or not isinstance(group.get("weights"), dict):
                raise config.fault("has a group without targets or weights", ("quantization_config",))
            everything = any(target in ("Linear", "re:.*") for target in targets)
            kind = group.get("format") or quantised.get("format") or ""
            format = _compressed(config, group["weights"], group.get("input_activations"), str(kind))
            found.append((None if everything else _Patterns(config, targets), format))
        if len(found) > 1 or found[0][0] is not None:
            return [(patterns or _Everything(config, ()), format) for patterns, format in found]
    return []


def _base_format(config: Config, quantised: dict) -> NumberFormat:
    """The one format of all linear modules."""
    method = str(quantised.get("quant_method") or "").lower()
    groups = quantised.get("config_groups")
    if isinstance(groups, dict) and groups:
        group = next(iter(groups.values()))
        return _compressed(
            config, group["weights"], group.get("input_activations"), str(group.get("format") or quantised.get("format") or "")
        )
    if (algorithm := quantised.get("quant_algo")) is not None:
        return _algorithm(config, algorithm)
    if method in ("fp8", "fbgemm_fp8", "modelopt", "ptpc_fp8", "deepseekfp8"):
        block = quantised.get("weight_block_size")
        scale = 32 / (block[0] * block[1]) if isinstance(block, list) and len(block) == 2 and all(block) else 0.0
        return NumberFormat(8 + (scale if scale >= LEAST_SCALE else 0.0), small_activations=True)
    if method in ("mxfp4", "modelopt_fp4", "petit_nvfp4"):
        return NumberFormat(4 + 8 / 32) if method == "mxfp4" else NumberFormat(4 + 8 / 16, small_activations=True)
    if method in (
        "awq",
        "gptq",
        "auto-round",
        "auto_round",
        "awq_marlin",
        "gptq_marlin",
        "moe_wna16",
        "compressed-tensors",
        "gptqmodel",
    ):
        bits = quantised.get("bits", quantised.get("w_bit", quantised.get("num_bits")))
        group = quantised.get("group_size", quantised.get("q_group_size", -1))
        symmetric = quantised.get("sym", quantised.get("zero_point") is False)
        if bits not in (2, 3, 4, 5, 6, 8) or type(group) is not int:
            raise config.fault(f"says {method} without bits and group_size", ("quantization_config",))
        return NumberFormat(bits + (0 if group <= 0 else (16 + (0 if symmetric else bits)) / group))
    if method == "bitsandbytes":
        if quantised.get("load_in_8bit"):
            return NumberFormat(8)
        doubled = quantised.get("bnb_4bit_use_double_quant") is True
        return NumberFormat(4 + (8 / 64 + 32 / (64 * 256) if doubled else 32 / 64))
    if method in ("int8", "w8a8_int8", "experts_int8", "eetq", "blockwise_int8"):
        return NumberFormat(8)
    if method == "quark":
        return _quark(config, quantised)
    raise config.fault(
        f"is of the method {quoted(method or 'that no key names')}, which Switchyard does not know; without the key its "
        "weights count as dtype says",
        tuple(sorted(QUANTISED)),
    )


def _algorithm(config: Config, name: object) -> NumberFormat:
    if (format := _of_algorithm(str(name).upper())) is None:
        raise config.fault(
            f"has quant_algo {quoted(name)}, which Switchyard does not know", ("quantization_config", "quantization")
        )
    return format


@functools.lru_cache(maxsize=64)  # lists name the algorithm of some hundred modules
def _of_algorithm(name: str) -> NumberFormat | None:
    found = (NumberFormat(bits, small) for pattern, bits, small in ALGORITHMS if re.fullmatch(pattern, name))
    return next(found, None)


def _compressed(config: Config, weights: dict, activations: object, kind: str) -> NumberFormat:
    """A scheme of compressed-tensors: bits, type, strategy and size of groups; `kind` is its format."""
    bits, group = weights.get("num_bits"), weights.get("group_size")
    if bits not in (2, 3, 4, 6, 8, 16):
        raise config.fault(f"has weights of num_bits {quoted(bits)}, which Switchyard does not know", ("quantization_config",))
    floats = weights.get("type") == "float"
    group = group if type(group) is int and group > 0 else 16 if "nvfp4" in kind else 32 if "mxfp" in kind else None
    scale = 0.0
    if group:
        scale = (8 if floats else 16) / group + (0 if floats or weights.get("symmetric", True) else bits / group)
    elif isinstance(block := weights.get("block_structure"), list) and len(block) == 2 and all(block):
        scale = 32 / (block[0] * block[1])
    stated = isinstance(activations, dict) and activations.get("type") == "float" and (activations.get("num_bits") or 16) <= 8
    small = stated or kind == "float-quantized"  # which compressed-tensors calls only what casts activations, too
    return NumberFormat(bits + (scale if scale >= LEAST_SCALE else 0.0), small)


def _quark(config: Config, quantised: dict) -> NumberFormat:
    """AMD's quark: `global_quant_config`, with `weight` and `input_tensors`."""
    every = quantised.get("global_quant_config")
    weight = every.get("weight") if isinstance(every, dict) else None
    weight = weight[0] if isinstance(weight, list) and weight else weight
    if not isinstance(weight, dict) or (format := _by_name(str(weight.get("dtype")))) is None:
        raise config.fault("of quark has no global weight format that Switchyard knows", ("quantization_config",))
    group, bits = weight.get("group_size"), float(int(format.bits))
    by_group = "group" in str(weight.get("qscheme")) and type(group) is int and group > 0
    scale = (8 if weight.get("scale_format") == "e8m0" or format.bits < 8 else 16) / group if by_group else 0.0
    inputs = every.get("input_tensors")
    return NumberFormat(bits + scale, isinstance(inputs, dict) and str(inputs.get("dtype", "")).startswith("fp"))


def _by_name(name: str) -> NumberFormat | None:
    """A format by a word such as fp4, fp8_e4m3 or int4."""
    name = name.lower()
    for start, format in (
        ("nvfp4", NumberFormat(4.5, True)),
        ("mxfp4", NumberFormat(4.25)),
        ("fp4", NumberFormat(4.25)),
        ("fp8", NumberFormat(8, True)),
        ("float8", NumberFormat(8, True)),
        ("int4", NumberFormat(4.125)),
        ("uint4", NumberFormat(4.125)),
        ("int8", NumberFormat(8)),
        ("bfloat16", NumberFormat(16)),
        ("bf16", NumberFormat(16)),
    ):
        if name.startswith(start):
            return format
    return None


MOST_REPEATS, LONGEST = 3, 300
"""Repeats in a regular expression, and its characters, up to which it is tried: with more a match may take for ever."""


_LAYER = re.compile(r"(?<=layers\.)\d+")


class _Patterns:
    """Names of modules: plain ones (a part of a path), with `*`, or regular expressions after `re:`."""

    def __init__(self, config: Config, entries: Iterable[object]):
        self._plain: dict[int | None, set[str]] = {}
        self._starts: list[tuple[str, str]] = []
        self._other: list[tuple[re.Pattern, bool]] = []
        for text in filter(None, map(str, entries)):
            number = _LAYER.search(text)
            as_first = _LAYER.sub("0", text)
            if text.startswith(("re:", "^", ".*")):
                self._other.append((_regular(config, text.removeprefix("re:")), bool(re.search(r"\d", text))))
            elif text.endswith("*") and not any(mark in text[:-1] for mark in "*?["):
                digits = "" if number is None else number[0] + ("" if number.end() == len(text) - 1 else "$")
                self._starts.append((as_first[:-1], digits))
            elif any(mark in text for mark in "*?["):
                self._other.append((re.compile(fnmatch.translate(text) + "|" + fnmatch.translate(f"{text}.*")), True))
            else:
                self._plain.setdefault(int(number[0]) if number else None, set()).add(as_first.strip("."))

    def reach(self, part: Part, layer: int) -> bool:
        """True if any module of the part is named, in any family's spelling."""
        return (
            any(not _steps(part).isdisjoint(self._plain.get(number, ())) for number in (None, layer))
            or any(f"{layer}$".startswith(digits) and _starts_one(start, part) for start, digits in self._starts)
            or any(_matches_one(pattern, part, layer if has_layers else 0) for pattern, has_layers in self._other)
        )


class _Everything(_Patterns):
    """All linear modules."""

    def reach(self, part: Part, layer: int) -> bool:
        return True


def _regular(config: Config, text: str) -> re.Pattern:
    """A regular expression of a config. Raises InputError for one that is none, and for those that could take for ever."""
    if len(text) > LONGEST or len(re.findall(r"[*+{]", text)) > MOST_REPEATS or re.search(r"\)[*+?{]", text):
        raise config.fault(
            f"has the expression {quoted(text)}, which is not tried: it repeats too much", tuple(sorted(QUANTISED))
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError):
        raise config.fault(f"has {quoted(text)}, which is no regular expression", tuple(sorted(QUANTISED))) from None


@functools.lru_cache(maxsize=4096)
def _starts_one(start: str, part: Part) -> bool:
    """True if a path to the part in layer 0 starts so."""
    return any(module.startswith(start) for module in _modules(part, 0))


@functools.lru_cache(maxsize=4096)
def _matches_one(pattern: re.Pattern, part: Part, layer: int) -> bool:
    return any(map(pattern.match, _modules(part, layer)))


@functools.lru_cache(maxsize=512)
def _modules(part: Part, layer: int) -> tuple[str, ...]:
    """Paths that families give to the matrices of a part in a layer."""
    if part == "attention":
        inner = [f"{mixer}.{projection}" for mixer in MIXERS for projection in PROJECTIONS]
    else:
        places = {"experts": ("experts.0", "experts"), "shared": ("shared_experts", "shared_expert"), "dense": ("",)}[part]
        ffns = FFNS if part != "dense" else ("mlp", "ffn", "feed_forward")
        inner = [".".join(filter(None, (ffn, place, matrix))) for ffn in ffns for place in places for matrix in MATRICES]
    return tuple(f"{prefix}.{layer}.{path}" for prefix in PREFIXES for path in inner)


@functools.cache
def _steps(part: Part) -> frozenset[str]:
    """Every run of steps in the paths of layer 0: `mlp`, `self_attn.q_proj`, `model.layers.0` and so on."""
    found = set()
    for module in _modules(part, 0):
        steps = module.split(".")
        found |= {".".join(steps[first:last]) for first in range(len(steps)) for last in range(first + 1, len(steps) + 1)}
    return frozenset(found - {"0", "layers", "model", "language_model", "model.layers", "backbone"})
