"""The base of everything that is saved, loaded or edited as JSON."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import InputError


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
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers and nesting beyond what the parser takes
            raise InputError(f"{where}: not valid JSON ({error})") from None
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
        return json.dumps(self.model_dump(mode="json", exclude_none=True), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def first_fault(error: ValidationError) -> str:
    """The first complaint of pydantic as `field → 0 → name: reason`."""
    fault = error.errors(include_url=False)[0]
    place = " → ".join(str(part) for part in fault["loc"])
    reason = fault["msg"].removeprefix("Value error, ")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {reason}{more}" if place else f"{reason}{more}"
