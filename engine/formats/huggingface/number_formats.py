"""Number formats of a checkpoint's weights, from `quantization_config` in all spellings, kind of matrix by kind of matrix."""

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.cluster import BITS_PER_DTYPE
from engine.formats.huggingface.config import QUANTISED, Config
from engine.formats.source import quoted

DTYPES = {
    **{"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"},
    **{"bf16": "bf16", "fp16": "fp16", "half": "fp16", "fp32": "fp32", "float": "fp32", "fp8": "fp8"},
}
LEAST_SCALE = 0.01
"""Bits a weight below which scales are left out: one number for a block of 128 × 128 weights, a channel or a matrix."""

Part = Literal["experts", "shared", "dense", "attention"]
Side = Literal["inward", "outward"]
"""The matrices of an FFN that tokens come in by, and the one that they leave by; of attention both are all matrices."""

FFNS = ("mlp", "block_sparse_moe", "ffn", "feed_forward", "mixer", "moe", "mlp.text_moe")
MATRICES = {
    "inward": ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "linear_fc1"),
    "outward": ("down_proj", "w2", "linear_fc2"),
}
MIXERS = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer", "mamba")
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa"),
    *(
        "wq",
        "wk",
        "wv",
        "wo",
        "wkv_a_with_mqa",
        "wkv_b",
        "wq_a",
        "wq_b",
        "wkv",
        "wo_a",
        "wo_b",
        "in_proj",
        "out_proj",
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_qkvz",
    ),
)
MISTRALS = ("wq", "wk", "wv", "wo", "wq_a", "wq_b", "wkv_a_with_mqa", "wkv_b")
"""Projections as Mistral's own files name them."""

PREFIXES = ("model.layers", "layers", "model.language_model.layers", "language_model.model.layers", "backbone.layers")

ALGORITHMS: tuple[tuple[str, float, bool], ...] = (
    ("NVFP4_AWQ|NVFP4_SVDQUANT|W4A4|NVFP4", 4 + 8 / 16, True),
    ("W4A16_NVFP4|NVFP4_A16", 4 + 8 / 16, False),
    ("W4A8_NVFP4_FP8|W4A8_MXFP4_FP8|MXFP4_MXFP8", 4.25, True),
    ("W4A16_MXFP4|MXFP4", 4 + 8 / 32, False),
    ("MXFP6|MXFP6_E3M2|MXFP6_E2M3", 6 + 8 / 32, True),
    ("W4A8_AWQ", 4 + 16 / 128, True),
    ("W4A16_AWQ|INT4_AWQ|W4A16|INT4", 4 + 16 / 128, False),
    ("MXFP8|W8A8_MXFP8", 8 + 8 / 32, True),
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


def number_formats(
    config: Config, layers: int, moe_layers: Iterable[int], mixers: Sequence[str] = (), matrices: int = 3
) -> NumberFormats:
    """Raises InputError for a way of quantisation that is not known, and names its key.

    layers: decoder layers
    moe_layers: those with experts
    mixers: the mixer of every layer, `none` where a layer is an FFN alone; empty: every layer has attention
    matrices: of an FFN
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
    rule = _rule(config, _quantised(config), whole)
    found = {part: [_of_layer(rule, part, layer, matrices) for layer in numbers] for part, numbers in where.items()}
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

Rule = Callable[[Part, Side, int], NumberFormat]


def _of_layer(rule: Rule, part: Part, layer: int, matrices: int) -> NumberFormat:
    """The mean format of a part's matrices in a layer."""
    inward, outward = rule(part, "inward", layer), rule(part, "outward", layer)
    bits = ((matrices - 1) * inward.bits + outward.bits) / matrices
    return NumberFormat(bits, inward.small_activations and outward.small_activations)


def _quantised(config: Config) -> dict:
    """The config's part on quantised weights, with all that it nests; empty if it has none."""
    found = config.get(*QUANTISED)
    for _ in range(4):
        if found is not None and not isinstance(found, dict):
            raise config.fault(f"must be an object, not {quoted(found)}", QUANTISED)
        inner = next((found[key] for key in QUANTISED if isinstance(found.get(key), dict)), None) if found else None
        if inner is None:
            break
        found = {key: value for key, value in found.items() if key not in QUANTISED} | inner
    return found or {}


def _rule(config: Config, quantised: dict, whole: NumberFormat) -> Rule:
    """The format of a part's matrices in a layer by the config's own lists: modules that are left out, then formats of modules
    by their names, then the one of all others."""
    skipped = [entry for name in LEFT_OUT for entry in _listed(config, quantised.get(name))]
    dynamic = [f"re:{entry[2:]}" for entry in _listed(config, quantised.get("dynamic")) if str(entry).startswith("-:")]
    left_out = _Patterns(config, [*skipped, *dynamic])
    named, others = _named_formats(config, quantised, whole) if quantised else ([], whole)

    def rule(part: Part, side: Side, layer: int) -> NumberFormat:
        if left_out.reach(part, side, layer):
            return whole
        return next((format for patterns, format in named if patterns.reach(part, side, layer)), others)

    return rule


def _listed(config: Config, entries: object) -> list:
    """The entries of a list, or the keys of an object; none of null. Raises InputError for anything else."""
    if entries is not None and not isinstance(entries, list | dict):
        raise config.fault(f"has {quoted(entries)} where modules are listed", QUANTISED)
    return list(entries or ())


Named = list[tuple["_Patterns", NumberFormat]]


def _named_formats(config: Config, quantised: dict, whole: NumberFormat) -> tuple[Named, NumberFormat]:
    """Formats that a config gives to modules by their names, first match first, and the one of all other linear modules."""
    if isinstance(modules := quantised.get("quantized_layers"), dict) and modules:
        algorithms = ((name, entry.get("quant_algo") if isinstance(entry, dict) else entry) for name, entry in modules.items())
        return _by_format(config, ((name, _algorithm(config, algorithm)) for name, algorithm in algorithms)), whole
    groups, sparsity = quantised.get("config_groups"), quantised.get("sparsity_config")
    if (isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense")) or quantised.get("format") == "marlin-24":
        raise config.fault("stores a part of the weights only (sparsity_config), which Switchyard does not know", QUANTISED)
    dense = quantised.get("format") in (None, "dense") or quantised.get("kv_cache_scheme")  # keys and values alone
    if quantised.get("quant_method") == "compressed-tensors" and not groups and dense:
        return [], whole
    if isinstance(groups, dict) and groups:
        return [_of_group(config, group, quantised) for group in groups.values()], whole
    if quantised.get("quant_method") == "quark" and (modules := quantised.get("layer_quant_config")):
        own = _by_format(config, ((name, _quark(config, entry)) for name, entry in _entries(config, modules)))
        every = quantised.get("global_quant_config")
        return own, _quark(config, every) if every else whole
    others = _base_format(config, quantised, whole)
    if (method := quantised.get("quant_method")) in ("mxfp4", "w4afp8", "experts_int8"):  # these are formats of experts
        return [(_Patterns(config, ["experts"]), others)], NumberFormat(8, True) if method == "w4afp8" else whole
    if inside := _listed(config, quantised.get("modules_in_block_to_quantize")):
        names = [name for entry in inside for name in (entry if isinstance(entry, list) else [entry])]
        return [(_Patterns(config, names), others)], whole
    return _by_format(config, _of_modules(config, quantised, whole)), others


def _of_modules(config: Config, quantised: dict, whole: NumberFormat) -> Iterator[tuple[str, NumberFormat]]:
    """Modules with settings of their own: GPTQ's `dynamic`, AutoRound's `extra_config`, and MLX's, which stand between the
    others. The settings that one leaves out are those of all modules."""
    dynamic = ((str(name), entry) for name, entry in _entries(config, quantised.get("dynamic")))
    own = {f"re:{name.removeprefix('+:')}": entry for name, entry in dynamic if not name.startswith("-:")}
    for name, entry in _entries(config, quantised.get("extra_config")):
        own[f"re:{name}" if re.search(r"[*+?|^$\\\[(]", str(name)) else str(name)] = entry
    if not quantised.get("quant_method"):
        own |= {name: entry for name, entry in quantised.items() if "." in name and (entry is False or isinstance(entry, dict))}
    usual = {key: value for key, value in quantised.items() if key not in ("dynamic", "extra_config")}
    for name, entry in own.items():
        settings = entry if isinstance(entry, dict) else {}
        plain = entry is False or (type(bits := settings.get("bits")) is int and bits >= 16)
        yield name, whole if plain else _base_format(config, usual | settings, whole)


def _entries(config: Config, modules: object) -> Iterable[tuple[object, object]]:
    """Names of modules and what is said of each. Raises InputError for anything but an object, a list or null."""
    return modules.items() if isinstance(modules, dict) else ((name, None) for name in _listed(config, modules))


def _by_format(config: Config, modules: Iterable[tuple[object, NumberFormat]]) -> Named:
    by_format: dict[NumberFormat, list[object]] = {}
    for name, format in modules:
        by_format.setdefault(format, []).append(name)
    return [(_Patterns(config, names), format) for format, names in by_format.items()]


def _of_group(config: Config, group: object, quantised: dict) -> tuple["_Patterns", NumberFormat]:
    """The modules and the format of a group of compressed-tensors."""
    targets = group.get("targets", ["Linear"]) if isinstance(group, dict) else None
    if not isinstance(targets, list) or not isinstance(group.get("weights"), dict):
        raise config.fault("has a group without targets or weights", QUANTISED)
    kind = group.get("format") or quantised.get("format") or ""
    format = _compressed(config, group["weights"], group.get("input_activations"), str(kind))
    everything = any(target in ("Linear", "re:.*") for target in targets)
    return (_Everything(config, ()) if everything else _Patterns(config, targets)), format


INTEGERS = ("awq", "gptq", "autoround", "intel/autoround", "inc", "awqmarlin", "gptqmarlin", "moewna16", "gptqmodel")
FP8_METHODS = ("fp8", "fbgemmfp8", "modelopt", "ptpcfp8", "deepseekfp8", "w8a8fp8")
INT8_METHODS = ("int8", "w8a8int8", "expertsint8", "eetq", "blockwiseint8")


def _base_format(config: Config, quantised: dict, whole: NumberFormat) -> NumberFormat:
    """The one format of all linear modules."""
    stated = str(quantised.get("quant_method") or quantised.get("mode") or "").lower()
    method = re.sub("[-_]", "", stated)
    if quantised.get("quant_algo") is not None:
        return _algorithm(config, quantised["quant_algo"])
    if "quant_algo" in quantised:  # null: keys and values alone are quantised
        return whole
    if (named := quantised.get("qformat_weight")) is not None:  # Mistral's params.json
        if (format := _by_name(str(named))) is None:
            raise config.fault(f"has qformat_weight {quoted(named)}, which Switchyard does not know", QUANTISED)
        return format
    if method in FP8_METHODS:
        return NumberFormat(8 + _of_block(quantised.get("weight_block_size")), small_activations=True)
    if method in ("mxfp4", "mxfp8", "modeloptmxfp8", "nvfp4", "modeloptfp4", "petitnvfp4"):
        mx = {"mxfp4": NumberFormat(4 + 8 / 32), "mxfp8": NumberFormat(8 + 8 / 32, True)}
        return mx.get(method.removeprefix("modelopt"), NumberFormat(4.5, True))
    if method == "humming":
        return _humming(config, quantised)
    if method == "w4afp8":
        return NumberFormat(4 + 16 / 128, small_activations=True)
    if method in INTEGERS or (method in ("", "affine") and {"bits", "group_size"} <= quantised.keys()):
        return _integers(config, quantised, stated)
    if method == "bitsandbytes" or (not method and not {"load_in_4bit", "load_in_8bit"}.isdisjoint(quantised)):
        if quantised.get("load_in_8bit") or quantised.get("_load_in_8bit"):
            return NumberFormat(8)
        if not (quantised.get("load_in_4bit") or quantised.get("_load_in_4bit")):
            raise config.fault("says bitsandbytes, and neither load_in_4bit nor load_in_8bit", QUANTISED)
        doubled = quantised.get("bnb_4bit_use_double_quant") is True
        return NumberFormat(4 + (8 / 64 + 32 / (64 * 256) if doubled else 32 / 64))
    if method in INT8_METHODS:
        return NumberFormat(8)
    if method == "quark":
        return _quark(config, quantised.get("global_quant_config"))
    raise config.fault(
        (f"is of the method {quoted(stated)}" if stated else "names no quant_method")
        + ", which Switchyard does not know; without the key its weights count as dtype says",
        QUANTISED,
    )


def _integers(config: Config, quantised: dict, stated: str) -> NumberFormat:
    """Integers in groups with scales of 16 bits and, unless they are symmetric, zero points: of AWQ and GPTQ as wide as a
    weight, of MLX, which names no method, of 16 bits. AutoRound also writes floats in groups."""
    bits = quantised.get("bits", quantised.get("w_bit", quantised.get("num_bits")))
    group = quantised.get("group_size", quantised.get("q_group_size", 128))
    if bits not in (2, 3, 4, 5, 6, 8) or type(group) is not int:
        raise config.fault(f"says {stated or 'no method'} without bits and group_size", QUANTISED)
    kind, activations = str(quantised.get("data_type") or "int"), quantised.get("act_bits")
    small = type(activations) is int and activations <= 8 and "fp" in str(quantised.get("act_data_type") or kind)
    if "fp" in kind:
        return NumberFormat(bits + (8 / group if group > 0 and ("mx" in kind or "nv" in kind) else 0), small)
    if stated in ("", "affine") and {"sym", "zero_point"}.isdisjoint(quantised):
        return NumberFormat(bits + (32 / group if group > 0 else 0))
    symmetric = quantised.get("sym", quantised.get("zero_point") is False)
    return NumberFormat(bits + (0 if group <= 0 else (16 + (0 if symmetric else bits)) / group), small)


def _humming(config: Config, quantised: dict) -> NumberFormat:
    """Integers or small floats with scales, as Humming's schemas name them: `b_dtype` of weights, `bs_dtype` of their scales,
    `a_dtype` of activations."""
    kind, scales, group = (
        next((quantised[name] for name in names if quantised.get(name) is not None), usual)
        for names, usual in (
            (("b_dtype", "dtype"), ""),
            (("bs_dtype", "scale_dtype"), "bfloat16"),
            (("weight_scale_group_size", "group_size"), 0),
        )
    )
    bits, scale = (re.fullmatch(r"(?:u?int|b?float)(\d{1,2})\w*", str(name)) for name in (kind, scales))
    if not (bits and scale and int(bits[1]) in range(1, 9)) or type(group) is not int:
        raise config.fault(
            f"of humming has b_dtype {quoted(kind)}, bs_dtype {quoted(scales)}, group {quoted(group)}", QUANTISED
        )
    more = (int(scale[1]) + (int(bits[1]) if quantised.get("has_zero_point") is True else 0)) / group if group > 0 else 0
    return NumberFormat(int(bits[1]) + more, bool(re.match("float[48]", str(quantised.get("a_dtype")))))


def _of_block(block: object) -> float:
    """Bits of scales a weight, of 32 bits for a block of weights; 0 where there are no blocks."""
    sizes = [size for size in block if type(size) is int and size > 0] if isinstance(block, list) else []
    scale = 32 / (sizes[0] * sizes[1]) if len(sizes) == 2 else 0.0
    return scale if scale >= LEAST_SCALE else 0.0


def _algorithm(config: Config, name: object) -> NumberFormat:
    if (format := _of_algorithm(str(name).upper())) is None:
        raise config.fault(f"has quant_algo {quoted(name)}, which Switchyard does not know", QUANTISED)
    return format


@functools.lru_cache(maxsize=64)  # lists name the algorithm of some hundred modules
def _of_algorithm(name: str) -> NumberFormat | None:
    found = (NumberFormat(bits, small) for pattern, bits, small in ALGORITHMS if re.fullmatch(pattern, name))
    return next(found, None)


def _compressed(config: Config, weights: dict, activations: object, kind: str) -> NumberFormat:
    """A scheme of compressed-tensors: bits, type, strategy and size of groups; `kind` is its format."""
    bits, group = weights.get("num_bits"), weights.get("group_size")
    if bits not in (2, 3, 4, 6, 8, 16):
        raise config.fault(f"has weights of num_bits {quoted(bits)}, which Switchyard does not know", QUANTISED)
    floats = weights.get("type") == "float"
    group = group if type(group) is int and group > 0 else 16 if "nvfp4" in kind else 32 if "mxfp" in kind else None
    scale = 0.0
    if group:
        scale = (8 if floats else 16) / group + (0 if floats or weights.get("symmetric", True) else bits / group)
    else:
        scale = _of_block(weights.get("block_structure"))
    stated = isinstance(activations, dict) and activations.get("type") == "float" and (activations.get("num_bits") or 16) <= 8
    small = stated or kind == "float-quantized"  # which compressed-tensors calls only what casts activations, too
    return NumberFormat(bits + (scale if scale >= LEAST_SCALE else 0.0), small)


def _quark(config: Config, every: object) -> NumberFormat:
    """A part of AMD's quark, with `weight` and `input_tensors`; of weights that are quantised twice the smaller ones are
    stored."""
    weight = every.get("weight") if isinstance(every, dict) else None
    entries = [entry for entry in (weight if isinstance(weight, list) else [weight]) if isinstance(entry, dict)]
    known = [(format, entry) for entry in entries if (format := _by_name(str(entry.get("dtype")))) is not None]
    if not known:
        raise config.fault("of quark has no weight format that Switchyard knows", QUANTISED)
    format, weight = min(known, key=lambda pair: pair[0].bits)
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
        self._mistral = config.get("dim") is not None and config.get("n_layers") is not None
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

    def reach(self, part: Part, side: Side, layer: int) -> bool:
        """True if any module on this side of the part is named, in any family's spelling."""
        way = (part, side)
        return (
            any(not _steps(*way, self._mistral).isdisjoint(self._plain.get(number, ())) for number in (None, layer))
            or any(f"{layer}$".startswith(digits) and _starts_one(start, *way, self._mistral) for start, digits in self._starts)
            or any(_matches_one(pattern, *way, layer if numbered else 0, self._mistral) for pattern, numbered in self._other)
        )


class _Everything(_Patterns):
    """All linear modules."""

    def reach(self, part: Part, side: Side, layer: int) -> bool:
        return True


def _regular(config: Config, text: str) -> re.Pattern:
    """A regular expression of a config. Raises InputError for one that is none, and for those that could take for ever."""
    if len(text) > LONGEST or len(re.findall(r"[*+{]", text)) > MOST_REPEATS or re.search(r"\)[*+?{]", text):
        raise config.fault(f"has the expression {quoted(text)}, which is not tried: it repeats too much", QUANTISED)
    try:
        return re.compile(text)
    except (re.error, OverflowError):
        raise config.fault(f"has {quoted(text)}, which is no regular expression", QUANTISED) from None


@functools.lru_cache(maxsize=4096)
def _starts_one(start: str, part: Part, side: Side, mistral: bool) -> bool:
    """True if a path to the part in layer 0 starts so."""
    return any(module.startswith(start) for module in _modules(part, side, 0, mistral))


@functools.lru_cache(maxsize=4096)
def _matches_one(pattern: re.Pattern, part: Part, side: Side, layer: int, mistral: bool) -> bool:
    return any(map(pattern.match, _modules(part, side, layer, mistral)))


@functools.lru_cache(maxsize=512)
def _modules(part: Part, side: Side, layer: int, mistral: bool) -> tuple[str, ...]:
    """Paths that families give to the matrices of a part in a layer; mistral: that Mistral gives in its own files."""
    prefixes, matrices = PREFIXES, MATRICES[side]
    if mistral:
        prefixes, matrices = ("layers",), tuple(matrix for matrix in matrices if matrix.startswith("w"))
    if part == "attention":
        inner = [f"{mixer}.{projection}" for mixer in MIXERS for projection in PROJECTIONS]
        inner = [f"attention.{projection}" for projection in MISTRALS] if mistral else inner
    else:
        places = {"experts": ("experts.0", "experts"), "shared": ("shared_experts", "shared_expert"), "dense": ("",)}[part]
        ffns = FFNS if part != "dense" else ("mlp", "ffn", "feed_forward")
        if mistral:
            ffns = ("",) if part != "dense" else ("feed_forward",)
        inner = [".".join(filter(None, (ffn, place, matrix))) for ffn in ffns for place in places for matrix in matrices]
    return tuple(f"{prefix}.{layer}.{path}" for prefix in prefixes for path in inner)


@functools.cache
def _steps(part: Part, side: Side, mistral: bool) -> frozenset[str]:
    """Every run of steps in the paths of layer 0: `mlp`, `self_attn.q_proj`, `model.layers.0` and so on."""
    found = set()
    for module in _modules(part, side, 0, mistral):
        steps = module.split(".")
        found |= {".".join(steps[first:last]) for first in range(len(steps)) for last in range(first + 1, len(steps) + 1)}
    return frozenset(found - {"0", "layers", "model", "language_model", "model.layers", "backbone"})
