"""Columns of numbers in documents: arrays in memory; in JSON lists, or text where they are long.

A send order of 320 GPUs has up to twelve million sends in its 58 layers. As lists those of a plan took twelve seconds to read;
as base64 of the numbers' own bytes twelve million take less than two.
"""

import base64
import re
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field, GetCoreSchemaHandler, NonNegativeFloat, SerializationInfo
from pydantic_core import CoreSchema, core_schema

LONG = 16_384
"""Numbers of a column that is written as text."""

_TEXT = re.compile(r"(u1|u2|i4|f8):([A-Za-z0-9+/]*={0,2})", re.ASCII)
"""A dtype of numpy and little-endian numbers of it in base64."""

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class _Column:
    """How pydantic reads and writes a column. dtype: in memory; items: what a list of them may hold."""

    dtype: type[np.number]
    items: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
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
        """A copy of an array in the dtype that is kept in memory. Raises ValueError for numbers that it cannot hold."""
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


def _written(column: np.ndarray, info: SerializationInfo) -> np.ndarray | list[float] | str:
    """Whole numbers in the fewest bytes that hold all of them, so that equal columns have equal text."""
    if info.mode == "python":
        return column
    if len(column) < LONG:
        return column.tolist()
    if column.dtype.kind == "f":
        dtype = "f8"
    elif column.min() < 0:
        dtype = "i4"
    else:
        dtype = next(name for name, limit in (("u1", 2**8), ("u2", 2**16), ("i4", 2**31)) if column.max() < limit)
    return f"{dtype}:{base64.b64encode(column.astype(f'<{dtype}').tobytes()).decode()}"


Integers = Annotated[np.ndarray, _Column(np.int32, Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)])]
"""int32[row], read-only; arrays, lists and text are accepted."""

Amounts = Annotated[np.ndarray, _Column(np.float64, NonNegativeFloat)]
"""float64[row], read-only, finite and not negative."""
