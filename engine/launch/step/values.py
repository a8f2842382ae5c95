"""Tensors that are made and read in parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Cut(Protocol):
    """How a tensor's rows are divided into parts."""

    count: int

    def part(self, whole: Tensor, index: int) -> Tensor: ...

    def whole(self, parts: Sequence[Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Slices:
    """Parts that lie one after another. bounds: rows, [part + 1]."""

    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def part(self, whole: Tensor, index: int) -> Tensor:
        return whole[self.bounds[index] : self.bounds[index + 1]] if self.count > 1 else whole

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)) if self.count > 1 else parts[0]


class Rows:
    """Parts whose rows lie anywhere. rows: int64 of each part, every row of the whole in one of them."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.rows, self.count = tuple(rows), len(rows)
        self.inverse = torch.argsort(torch.cat(self.rows))

    def part(self, whole: Tensor, index: int) -> Tensor:
        return whole.index_select(0, self.rows[index])

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).index_select(0, self.inverse)


class Value:
    """What an operator makes, part by part. Who reads it as it was made gets the parts as they are; who reads it whole or cut
    in another way has it put together first, once."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._cut: Cut | None = None
        self._parts: dict[int, Tensor | Callable[[], Tensor]] = {}
        self._whole: Tensor | None = None

    def put(self, cut: Cut, index: int, part: Tensor | Callable[[], Tensor]) -> None:
        """A part, or what makes it when it is first read."""
        self._cut = cut
        self._parts[index] = part

    def room(self, cut: Slices, index: int, like: Tensor, width: int) -> Tensor:
        """Uninitialised memory for a part of a matrix, beside the other parts, so that nothing has to be moved later."""
        if cut.count == 1:
            part = like.new_empty((len(like), width))
            self.put(cut, index, part)
            return part
        if self._whole is None:
            self._whole = like.new_empty((cut.bounds[-1], width))
        self.put(cut, index, cut.part(self._whole, index))
        return self._parts[index]

    def has(self, cut: Cut, index: int) -> bool:
        """Whether there is anything to get a part from."""
        return self._whole is not None or (cut == self._cut and index in self._parts)

    def get(self, cut: Cut, index: int) -> Tensor:
        """A part of the value under some cut."""
        if cut != self._cut or not self._parts:
            return cut.part(self.whole(), index)
        part = self._parts[index]
        if not isinstance(part, Tensor):
            part = self._parts[index] = part()
        return part

    def whole(self) -> Tensor:
        """All of it."""
        if self._whole is None:
            self._whole = self._cut.whole([self.get(self._cut, index) for index in range(self._cut.count)])
            self._parts.clear()
        return self._whole
