"""`routed_experts`: the choices of one request as an engine's answer carries them, in base64.

vLLM (0.31 and later, `choices[i].routed_experts`) encodes a complete `.npy`, with shape and dtype inside: uint8 or uint16
[rows, MoE layers, k]. SGLang (`meta_info["routed_experts"]`, srt/layers/topk_capturer_base.py) encodes bare int32 in C order
[rows, decoder layers, k]; layers and k come from the model. Both count rows as prompt + completion - 1: the last token was
sampled and never forwarded.

Their buffers begin as zeros, so a dense layer, or a token that no forward pass saw, has k times the id 0. A token cannot
choose the same expert twice: with k > 1 such choices become -1. With k = 1 they cannot be told from expert 0 and stay.
"""

import base64
import binascii
import io
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from engine import units
from engine.errors import InputError
from engine.formats.arrays import MAX_EXPERTS, MAX_K, MAX_LAYERS, first
from engine.formats.numpy_files import read_header
from engine.formats.source import MAX_FILE_BYTES, PARSER_ERRORS, ok, quoted
from engine.workload import Finding

_WIRE_DTYPES = {"int32": np.dtype("<i4"), "uint16": np.dtype("<u2"), "uint8": np.dtype("u1")}


CACHED = ("cached_tokens", "num_cached_tokens", "prompt_cache_hit_tokens")
PROMPT, GENERATED = ("prompt_tokens", "input_tokens", "num_prompt_tokens"), ("completion_tokens", "output_tokens")
"""Names of numbers of tokens: OpenAI's, for answers of both its interfaces, and those of engines."""
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
PARTS = ("meta_info", "sglext", "sgl_ext", "engine_data", "disaggregated_params")
"""Parts of an answer in which SGLang has `routed_experts`."""
_DEEPEST = 5
"""Lists and objects in which logs of requests and batches keep an answer."""


def count_of(part: object, names: Sequence[str]) -> int | None:
    """The first number of tokens that a part of an answer has under one of these names, None without any. Digits in a text are
    a number too."""
    for name in names if isinstance(part, dict) else ():
        value = part.get(name)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
            value = int(value)
        if type(value) is int and 0 <= value < 2**31:
            return value
    return None


def cached_tokens(*parts: object) -> int:
    """Tokens of a prompt that were not computed, as a cache held them, by the first of these parts of an answer that says so: 0
    if none does. OpenAI's usage has them among its details."""
    for part in parts:
        for held in (part, *((part.get(name) for name in _DETAILS) if isinstance(part, dict) else ())):
            if (cached := count_of(held, CACHED)) is not None:
                return cached
    return 0


def answers_in(value: object, is_answer: Callable[[object], bool], depth: int = 0) -> Iterator[object]:
    """The answers in a value of JSON: itself, or those that logs of requests and batches keep in it."""
    if is_answer(value) or depth > _DEEPEST:
        yield value
    elif isinstance(value, dict | list):
        inside = value if isinstance(value, list) else [value[name] for name in value if name not in PARTS]
        for inner in inside:
            if isinstance(inner, dict | list):
                yield from answers_in(inner, is_answer, depth + 1)


def without_cached(experts: np.ndarray, *parts: object) -> np.ndarray:
    """The choices of a whole answer, int16[row, layer, k], -1 for rows of its prompt that a cache held by these parts of it."""
    prompt = next((count for part in parts if (count := count_of(part, PROMPT)) is not None), None)
    cached = min(cached_tokens(*parts), len(experts) if prompt is None else prompt)
    return np.where(np.arange(len(experts))[:, None, None] < cached, np.int16(-1), experts)


def say_cached(cached: int, rows: int) -> tuple[Finding, ...]:
    """The finding on rows of cached prefixes, () without any. rows: of all answers"""
    said = f"{cached:,} of {rows:,} rows ({units.share(cached / max(rows, 1))}) are of prompts' prefixes that a cache held "
    said += "(cached_tokens): no pass of these answers computed them, so they are left out."
    return (ok("cached-left-out", said),) if cached else ()


def decode_npy(text: str) -> np.ndarray:
    """The choices in a base64 `.npy` (vLLM), int16[row, layer, k]; -1 = not captured. Raises InputError."""
    data = _decode_base64(text)
    file = io.BytesIO(data)
    try:
        shape, fortran_order, dtype = read_header(file)
    except PARSER_ERRORS as error:
        raise InputError(
            f"routed_experts: the base64 is no readable .npy array ({str(error)[:60]}); SGLang's bare int32 needs layers and k"
        ) from None
    if dtype.kind not in "iu":
        raise InputError(f"routed_experts: holds {dtype}, expert ids are integers")
    _check_shape(shape)
    if math.prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise InputError(
            f"routed_experts: is cut short or too long: {dtype} {list(shape)} needs {math.prod(shape) * dtype.itemsize} "
            f"bytes, there are {len(data) - file.tell()}"
        )
    ids = np.frombuffer(data, dtype, offset=file.tell())
    return _checked(ids.reshape(shape, order="F" if fortran_order else "C"))


def decode_int32(text: str, layers: int, k: int, dtype: str = "int32") -> np.ndarray:
    """The choices in base64 int32 without a header (SGLang), int16[row, layer, k]; -1 = dense layer or not captured.

    layers: all decoder layers of the model, dense ones too (`num_hidden_layers`)
    k: experts per token
    dtype: `meta_info["routed_experts_dtype"]` of a server that narrows ids (SGLANG_ROUTED_EXPERTS_DTYPE)

    Raises InputError, also when the bytes are no whole number of rows: then `layers` or `k` are another model's.
    """
    if dtype not in _WIRE_DTYPES:
        raise InputError(f"routed_experts: dtype {quoted(dtype)} is not one of {', '.join(_WIRE_DTYPES)}")
    wire = _WIRE_DTYPES[dtype]
    data = _decode_base64(text)
    row = layers * k * wire.itemsize
    if row < 1 or len(data) % row:
        raise InputError(
            f"routed_experts: {len(data)} bytes are no whole number of tokens of {layers} layers × {k} experts × "
            f"{wire.itemsize} bytes; is it this model's? All decoder layers count, dense ones too"
        )
    shape = len(data) // row, layers, k
    _check_shape(shape)
    return _checked(np.frombuffer(data, wire).reshape(shape))


def decode_lists(rows: object) -> np.ndarray:
    """The choices in nested lists (vLLM 0.14 to 0.21), int16[row, layer, k]; -1 = not captured. Raises InputError."""
    try:
        ids = np.asarray(rows)
    except (ValueError, OverflowError):
        raise InputError("routed_experts: lists that differ in length; each token needs as many layers and experts") from None
    if ids.dtype.kind not in "iu":
        raise InputError("routed_experts: must be lists of whole numbers, [tokens][layers][k]")
    _check_shape(ids.shape)
    return _checked(ids)


def _decode_base64(text: str) -> bytes:
    if not isinstance(text, str):
        raise InputError(f"routed_experts: a base64 text is needed, not {type(text).__name__}")
    if len(text) > MAX_FILE_BYTES:
        raise InputError(
            f"routed_experts: {len(text) / 1024**2:.0f} MB, more than the limit of {MAX_FILE_BYTES // 1024**2} MB a request; "
            "record shorter requests"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("routed_experts: is not base64, or was cut short") from None


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or min(shape) < 1:
        raise InputError(f"routed_experts: must be [tokens, layers, k] with at least one of each, not {list(shape)}")
    if shape[1] > MAX_LAYERS or shape[2] > MAX_K:
        raise InputError(
            f"routed_experts: is {list(shape)}; at most {MAX_LAYERS} layers and {MAX_K} experts per token are possible"
        )


def _checked(ids: np.ndarray) -> np.ndarray:
    """Integers [row, layer, k] as int16 of that shape, -1 for choices that were not captured; raises InputError."""
    faulty = (ids < -1) | (ids >= MAX_EXPERTS)
    if faulty.any():
        row, layer, _ = at = first(faulty)
        raise InputError(f"routed_experts: expert {ids[at]} is out of range 0 … {MAX_EXPERTS - 1} (token {row}, layer {layer})")
    experts = ids.astype(np.int16)
    if ids.shape[2] > 1:
        experts[(experts == 0).all(axis=2)] = -1
    return experts
