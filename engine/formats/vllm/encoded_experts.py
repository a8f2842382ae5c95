"""The JSON values in which engines give one request's routing: a text, lists, or an object with its shape beside the bytes.

* vLLM 0.31 and later: base64 of a complete `.npy`
* vLLM 0.14 to 0.21: lists `[rows][layers][k]`; some servers `{"encoding": "base64", "dtype", "shape", "data"}`
* LightLLM (docs/r3_routing_capture.md): `{"shape", "data"}`, base64 of int32
* NVIDIA Dynamo (components/src/dynamo/vllm/handlers.py): `{"shape", "dtype", "start", "data"}`, base64; before mid-2026 base85,
  as PrimeIntellect's prime-rl and verifiers sent it
* SGLang and older Dynamo: base64 of bare int32, whose layers and k only the open model knows
"""

import base64
import binascii
import math
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.formats.arrays import MAX_K, MAX_LAYERS
from engine.formats.number_lists import array_of_lists
from engine.formats.routed_experts import decode_int32, decode_lists, decode_npy
from engine.formats.source import MAX_FILE_BYTES, quoted
from engine.model import MoEModel

NPY_IN_BASE64 = "k05VTVB"
"""How base64 of `\\x93NUMPY` begins."""
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int16", "uint16", "int32", "int64")}
_OF_WIDTH = {1: _DTYPES["uint8"], 2: _DTYPES["int16"], 4: _DTYPES["int32"], 8: _DTYPES["int64"]}


@dataclass(frozen=True)
class Encoded:
    """experts: int16[row, layer, k], -1 = not captured; start: rows of the prompt left out before the first, None: not said"""

    experts: np.ndarray
    start: int | None = None


def decode(value: object, model: MoEModel | None) -> Encoded:
    """The routing in a value of a `routed_experts` key; raises InputError, its text beginning with `routed_experts: `.

    value: as it is in JSON, lists perhaps read as an array
    model: the open model, for bytes without a shape
    """
    if isinstance(value, str):
        return Encoded(_decode_text(value, model))
    if isinstance(value, dict):
        return _decode_object(value)
    if isinstance(value, list | np.ndarray):
        return Encoded(decode_lists(_integers(value)))
    raise InputError(f"routed_experts: a text, lists or an object are needed, not {quoted(value)}")


def _integers(rows: list | np.ndarray) -> np.ndarray:
    """int[row, layer, k] from lists of lists of lists; raises InputError."""
    ids = array_of_lists(rows, 3)
    if ids is None:
        raise InputError(
            "routed_experts: must be lists of whole numbers, [tokens][layers][k], as many layers and experts for each token"
        )
    return ids


def _decode_text(text: str, model: MoEModel | None) -> np.ndarray:
    if text.startswith(NPY_IN_BASE64):
        return decode_npy(text)
    if model is None:
        raise InputError(
            "routed_experts: is base64 without a shape, as SGLang sends it; say which model it is of (--model, or open the "
            "model first)"
        )
    return decode_int32(text, model.layers, model.experts_per_token)


def _decode_object(value: dict) -> Encoded:
    shape, data, start = value.get("shape"), value.get("data"), value.get("start")
    if not isinstance(data, str) or not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise InputError("routed_experts: an object needs a text 'data' and a list 'shape'")
    if len(shape) != 3 or min(shape) < 1 or shape[1] > MAX_LAYERS or shape[2] > MAX_K:
        raise InputError(
            f"routed_experts: shape {quoted(shape)} must be [tokens, layers, k], at most {MAX_LAYERS} layers and k = {MAX_K}"
        )
    if start is not None and not _is_count(start):
        raise InputError(f"routed_experts: start {quoted(start)} must be a number of rows")
    if value.get("encoding") not in (None, "base64", "base85"):
        raise InputError(f"routed_experts: encoding {quoted(value['encoding'])} is neither base64 nor base85")
    said = value.get("dtype")
    if said is not None and not (isinstance(said, str) and said in _DTYPES):
        raise InputError(f"routed_experts: dtype {quoted(said)} is not one of {', '.join(_DTYPES)}")
    numbers = math.prod(shape)
    widths = tuple(_OF_WIDTH) if said is None else (_DTYPES[said].itemsize,)
    raw = _bytes_of(data, value.get("encoding"), {numbers * width for width in widths})
    dtype = _OF_WIDTH[len(raw) // numbers] if said is None else _DTYPES[said]
    return Encoded(decode_lists(np.frombuffer(raw, dtype).reshape(shape)), start)


def _bytes_of(data: str, encoding: str | None, sizes: set[int]) -> bytes:
    """The bytes, which are of one of `sizes`. Of the same number of bytes base64 makes more characters than base85, so what is
    said nowhere is told by the length."""
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"routed_experts: more than {MAX_FILE_BYTES // 1024**2} MB; record shorter requests")
    lengths = []
    for name, decode_bytes in (("base64", _from_base64), ("base85", base64.b85decode)):
        if encoding in (None, name):
            try:
                raw = decode_bytes(data)
            except (ValueError, binascii.Error):
                continue
            if len(raw) in sizes:
                return raw
            lengths.append(len(raw))
    there = " or ".join(str(length) for length in lengths) if lengths else "no readable"
    needed = " or ".join(str(size) for size in sorted(sizes))
    raise InputError(
        f"routed_experts: data is cut short or too long: its shape needs {needed} bytes, there are {there}"
    )


def _from_base64(data: str) -> bytes:
    return base64.b64decode(data, validate=True)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
