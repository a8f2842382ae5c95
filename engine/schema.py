"""The base of everything that is saved, loaded or edited as JSON."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import from_json, to_json

from engine.errors import InputError, one_line
from engine.finite import json_text

LONG = 256
"""Numbers of a list, or characters of a text, that pydantic's own JSON writes ten times as fast: send orders have millions."""


class Frozen(BaseModel):
    """Immutable, strict about its fields, and named by the SHA-256 of its canonical JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def from_dict(cls, data: object, where: str) -> Self:
        """Validate `data`; raises InputError that starts with `where` and names the first faulty field."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
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
        """Whether all fields are equal. Cached properties do not count: they may be arrays, whose == is no yes or no."""
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in type(self).model_fields)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """See pydantic; without the cached properties, which were computed from the fields before the update."""
        copied = super().model_copy(update=update, deep=deep)
        for name in set(vars(copied)) - set(type(self).model_fields):
            del vars(copied)[name]
        return copied

    def to_json(self) -> str:
        """Canonical JSON: keys sorted, absent parts left out, so that equal values have equal text."""
        return "".join(_pieces(self.model_dump(mode="json", exclude_none=True)))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        return self.digest_without()

    def digest_without(self, *fields: str) -> str:
        """The same of a document without these fields."""
        hasher = hashlib.sha256()
        for piece in _pieces(self.model_dump(mode="json", exclude_none=True, exclude=set(fields))):
            hasher.update(piece.encode())
        return hasher.hexdigest()


class Kept(Frozen):
    """What is kept for later versions of Switchyard to read, and so says of which version it is. The first ones did not, and
    the version is no part of what they are: it is left out of the digest."""

    NEWEST: ClassVar[int] = 1
    """Raise it when a field is renamed or means something else, and let a validator mend the older ones."""

    version: int = Field(1, ge=1)

    @field_validator("version")
    @classmethod
    def _is_known(cls, version: int) -> int:
        if version > cls.NEWEST:
            raise ValueError(f"{version} is of a later Switchyard, this one knows {cls.NEWEST}")
        return cls.NEWEST

    def digest_without(self, *fields: str) -> str:
        """See `Frozen`."""
        return super().digest_without("version", *fields)


def _pieces(data: object) -> Iterator[str]:
    """Plain data as JSON with sorted keys and no spaces, piece by piece; together always the text of
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
        yield (
            to_json(data).decode() if _written_alike(data) else json_text(data, sort_keys=True, separators=(",", ":"))
        )


def _has_long_parts(data: object) -> bool:
    if isinstance(data, dict):
        return any(map(_has_long_parts, data.values()))
    if isinstance(data, str):
        return len(data) >= LONG and data.isascii() and data.isprintable()  # what Python writes alike
    if isinstance(data, list) and data:
        return any(map(_has_long_parts, data)) if isinstance(data[0], dict) else len(data) >= LONG
    return False


def _written_alike(data: list) -> bool:
    """Whether a list has nothing but numbers that Python and pydantic write with the same digits: integers, and floats that
    need no exponent."""
    kinds = set(map(type, data))
    if kinds != {float}:
        return kinds == {int}
    size = np.abs(np.array(data))
    return bool(((size == 0) | ((size >= 1e-4) & (size < 1e16))).all())


def shortened(text: str, most: int = 80) -> str:
    """A text out of a file, cut to what a message has room for."""
    return text if len(text) <= most else f"{text[:most]}…"


def first_fault(error: ValidationError) -> str:
    """The first complaint of pydantic as `field → 0 → name: reason`."""
    fault = error.errors(include_url=False)[0]
    place = " → ".join(one_line(shortened(str(part))) for part in fault["loc"])
    reason = fault["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {reason}{more}" if place else f"{reason}{more}"
