"""The base of everything that is saved, loaded or edited as JSON: documents, their columns of numbers, and types of quantities.

Numbers leave the engine finite or not at all. Columns of numbers are arrays in memory; in JSON they are lists, or text if they
are long: a send order of 320 GPUs has up to twelve million sends in its 58 layers, and as lists those took twelve seconds to
read, as base64 of the numbers' own bytes less than two.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import pydantic
from pydantic_core import CoreSchema, core_schema, from_json, to_json

from engine.errors import InputError, one_line

TOO_FAR_APART = "its numbers are too far apart, or too large, to be computed with in double precision"


def require_finite(*numbers: float | np.ndarray | None) -> None:
    """Raise InputError unless all of these numbers are finite; None counts as absent."""
    for number in numbers:
        if number is not None and not np.isfinite(number).all():
            raise InputError(TOO_FAR_APART)


def json_text(data: Any, sort_keys: bool = False, separators: tuple[str, str] | None = None) -> str:
    """Plain data as JSON. Raises InputError for infinity and NaN, which JSON does not have."""
    try:
        return json.dumps(data, sort_keys=sort_keys, separators=separators, allow_nan=False)
    except ValueError:
        raise InputError(TOO_FAR_APART) from None


def long_json_text(data: Any) -> str:
    """As `json_text` without blanks, in a tenth of the time: orders of sends have millions of numbers."""
    text = to_json(data, inf_nan_mode="constants").decode()
    if "NaN" in text or "Infinity" in text:
        json_text(data)  # raises if it is a number, not a word in a text
    return text


LONG = 256
"""Numbers of a list, or characters of a text, from which on pydantic's JSON, ten times as fast, is used: send orders have
millions."""


class Frozen(pydantic.BaseModel):
    """Immutable, strict about its fields, and named by the SHA-256 of its canonical JSON."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def from_dict(cls, data: object, where: str) -> Self:
        """Validate `data`; raises InputError that starts with `where` and names the first faulty field."""
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            raise InputError(f"{where}: {first_fault(error)}") from None

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Self:
        """Parse and validate JSON text; raises InputError that starts with `where`."""
        try:
            data = from_json(text if isinstance(text, str) else text.decode(json.detect_encoding(text)))
        except ValueError as error:  # also bytes that are no text, and nesting beyond what the parser takes
            cut_off = "; it may be cut off" if str(error).startswith("EOF") else ""
            raise InputError(f"{where}: not valid JSON ({error}){cut_off}") from None
        return cls.from_dict(data, where)

    def __eq__(self, other: object) -> bool:
        """True if all fields are equal. Cached properties do not count: they may be arrays, for which == is not one answer."""
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As in pydantic, without the cached properties, which were computed from the fields before the update."""
        copied = super().model_copy(update=update, deep=deep)
        for name in set(vars(copied)) - set(type(self).model_fields):
            del vars(copied)[name]
        return copied

    def to_json(self) -> str:
        """The canonical JSON: keys sorted, absent parts left out, so that equal values have equal text."""
        return "".join(_pieces(self.model_dump(mode="json", exclude_none=True)))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the canonical JSON, in hexadecimal."""
        return self.digest_without()

    def digest_without(self, *fields: str) -> str:
        """The digest of the document without these fields."""
        hasher = hashlib.sha256()
        for piece in _pieces(self.model_dump(mode="json", exclude_none=True, exclude=set(fields))):
            hasher.update(piece.encode())
        return hasher.hexdigest()


class Kept(Frozen):
    """A document that later versions of Switchyard have to read, and that therefore states its version.

    The first documents did not, so the version is left out of the digest.
    """

    NEWEST: ClassVar[int] = 1
    """To be raised when a field is renamed or changes its meaning; a validator then mends older documents."""

    version: int = pydantic.Field(1, ge=1)

    @pydantic.field_validator("version")
    @classmethod
    def _is_known(cls, version: int) -> int:
        if version > cls.NEWEST:
            raise ValueError(f"{version} is of a later Switchyard, this one knows {cls.NEWEST}")
        return cls.NEWEST

    def digest_without(self, *fields: str) -> str:
        """As in `Frozen`, without the version."""
        return super().digest_without("version", *fields)


def _pieces(data: object) -> Iterator[str]:
    """Plain data as JSON with sorted keys and no spaces, piece by piece; together exactly the text of
    `json.dumps(data, sort_keys=True, separators=(",", ":"))`."""
    if not _has_long_parts(data):
        yield json_text(data, sort_keys=True, separators=(",", ":"))
    elif isinstance(data, dict):
        for turn, key in enumerate(sorted(data)):
            yield f"{',' if turn else '{'}{json.dumps(key)}:"
            yield from _pieces(data[key])
        yield "}"
    elif isinstance(data, str):
        yield to_json(data).decode()
    elif isinstance(data[0], dict):
        for turn, part in enumerate(data):
            yield "," if turn else "["
            yield from _pieces(part)
        yield "]"
    else:
        yield (to_json(data).decode() if _written_alike(data) else json_text(data, sort_keys=True, separators=(",", ":")))


def _has_long_parts(data: object) -> bool:
    if isinstance(data, dict):
        return any(map(_has_long_parts, data.values()))
    if isinstance(data, str):
        return len(data) >= LONG and data.isascii() and data.isprintable()  # Python's JSON writes it the same way
    if isinstance(data, list) and data:
        return any(map(_has_long_parts, data)) if isinstance(data[0], dict) else len(data) >= LONG
    return False


def _written_alike(data: list) -> bool:
    """True if a list has only numbers that Python and pydantic write with the same digits: integers, and floats that need no
    exponent."""
    kinds = set(map(type, data))
    if kinds != {float}:
        return kinds == {int}
    size = np.abs(np.array(data))
    return bool(((size == 0) | ((size >= 1e-4) & (size < 1e16))).all())


def shortened(text: str, most: int = 80) -> str:
    """A text out of a file, cut to the length that a message has room for."""
    return text if len(text) <= most else f"{text[:most]}…"


def first_fault(error: pydantic.ValidationError) -> str:
    """The first complaint of pydantic as `field → 0 → name: reason`. Kinds of numbers are one, and a list whose items are at
    fault is not itself."""
    faults: dict[tuple, str] = {}
    for fault in error.errors(include_url=False):
        place, reason = fault["loc"], fault["msg"].removeprefix("Value error, ")
        if place and place[-1] in ("int", "float"):
            place, reason = place[:-1], "Input should be a number"
        faults.setdefault(place, reason)
    inner = [place for place in faults if not any(place == each[: len(place)] != each for each in faults)]
    place, reason, more = " → ".join(one_line(shortened(str(part))) for part in inner[0]), faults[inner[0]], ""
    if len(inner) > 1:
        more = f" (and {len(inner) - 1} more)"
    return f"{place}: {reason}{more}" if place else f"{reason}{more}"


LONG_TEXT = 16_384
"""Numbers of a column from which on it is written as text."""

_TEXT = re.compile(r"(u1|u2|i4|f8):([A-Za-z0-9+/]*={0,2})", re.ASCII)
"""A dtype of numpy and little-endian numbers of it in base64."""

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class _Column:
    """Reading and writing of a column by pydantic.

    dtype: in memory
    items: the type of an item in a list
    """

    dtype: type[np.number]
    items: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(_written, info_arg=True)
        listed = handler.generate_schema(tuple[self.items, ...])
        return core_schema.no_info_wrap_validator_function(self._read, listed, serialization=written)

    def _read(self, data: object, read_list: core_schema.ValidatorFunctionWrapHandler) -> np.ndarray:
        if isinstance(data, str):
            data = _decoded(data)
        column = self._checked(data) if isinstance(data, np.ndarray) else np.array(read_list(data), self.dtype)
        column.flags.writeable = False
        return column

    def _checked(self, column: np.ndarray) -> np.ndarray:
        """A copy of an array in the dtype in memory. Raises ValueError for numbers that it cannot hold."""
        if column.ndim != 1:
            raise ValueError("must be one column of numbers")
        if np.issubdtype(self.dtype, np.floating):
            if not (np.isfinite(column) & (column >= 0)).all():
                raise ValueError("must be finite and not negative")
        elif column.dtype.kind not in "iu":
            raise ValueError("must be whole numbers")
        elif len(column) and not (column.min() >= -_LARGEST and column.max() <= _LARGEST):
            raise ValueError(f"must be whole numbers up to {_LARGEST}")
        return column.astype(self.dtype)


def _decoded(text: str) -> np.ndarray:
    if not (match := _TEXT.fullmatch(text)):
        raise ValueError("must be a list of numbers, or a dtype (u1, u2, i4 or f8), a colon and base64")
    dtype, encoded = match.groups()
    try:
        return np.frombuffer(base64.b64decode(encoded), dtype=f"<{dtype}")
    except ValueError:
        raise ValueError(f"is base64 that ends within a number of {dtype}") from None


def _written(column: np.ndarray, info: pydantic.SerializationInfo) -> np.ndarray | list[float] | str:
    """A column for JSON; whole numbers in the fewest bytes that hold all of them, so that equal columns have equal text."""
    if info.mode == "python":
        return column
    if len(column) < LONG_TEXT:
        return column.tolist()
    if column.dtype.kind == "f":
        dtype = "f8"
    elif column.min() < 0:
        dtype = "i4"
    else:
        dtype = next(name for name, limit in (("u1", 2**8), ("u2", 2**16), ("i4", 2**31)) if column.max() < limit)
    return f"{dtype}:{base64.b64encode(column.astype(f'<{dtype}').tobytes()).decode()}"


Integers = Annotated[np.ndarray, _Column(np.int32, Annotated[int, pydantic.Field(ge=-_LARGEST, le=_LARGEST)])]
"""int32[row], read-only; arrays, lists and text are accepted."""

Amounts = Annotated[np.ndarray, _Column(np.float64, pydantic.NonNegativeFloat)]
"""float64[row], read-only, finite and not negative."""

# Ranges of quantities of real machines, with room to spare: beyond them a number is a slip of the keyboard.

Rate = Annotated[float, pydantic.Field(ge=1e-3, le=1e30)]
"""Bytes/s or FLOP/s of one GPU, port or link; 1e30 stands for a network that costs nothing, to plan without one."""
Memory = Annotated[float, pydantic.Field(ge=1, le=1e21)]
"""Bytes of one GPU."""
StartUp = Annotated[float, pydantic.Field(ge=0, le=3600)]
"""Seconds before a transfer or an operation begins."""
Amount = Annotated[float, pydantic.Field(ge=1e-3, le=1e18)]
"""Bytes of a transfer, or a side of a matrix."""
Seconds = Annotated[float, pydantic.Field(ge=1e-12, le=1e6)]
"""Seconds of a measurement."""
