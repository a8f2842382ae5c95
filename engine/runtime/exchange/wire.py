"""Rows as they cross the network.

A row is bytes, in this order: the numbers, for 8-bit ones a 32-bit scale of each 128, and the 32-bit gate weights. Its
    length is `Travel.row_bytes`.
"""

import torch

from engine.model import MoEModel
from engine.plan import Travel
from engine.plan.send_order import BYTES_PER_SCALE, BYTES_PER_WEIGHT, NUMBERS_PER_SCALE
from engine.runtime.experts import TORCH_DTYPE

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


class Wire:
    """The rows of one direction; `bytes` is the length of one.

    dtype: format of the numbers, by its name or as PyTorch's
    width: numbers in a row
    weights: gate weights in a row
    """

    def __init__(self, dtype: str | torch.dtype, width: int, weights: int = 0) -> None:
        named = {"fp8": FP8} | TORCH_DTYPE
        self.dtype = dtype if isinstance(dtype, torch.dtype) else named[dtype]
        self.width, self.weights = width, weights
        self.groups = -(-width // NUMBERS_PER_SCALE) if dtype == "fp8" else 0
        self._numbers = width * self.dtype.itemsize
        self._scales = self._numbers + self.groups * BYTES_PER_SCALE
        self.bytes = self._scales + weights * BYTES_PER_WEIGHT

    def pack(self, vectors: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """uint8[row, byte] of numbers and gate weights.

        vectors: [row, width]
        weights: [row, weight], if the rows have some
        """
        parts = [*self._scaled(vectors)] if self.groups else [vectors.to(self.dtype)]
        if self.weights:
            parts.append(weights.float())
        packed = [part.contiguous().view(torch.uint8) for part in parts]
        return torch.cat(packed, dim=1) if len(packed) > 1 else packed[0]

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[row, width] of uint8[row, byte]."""
        numbers = rows[:, : self._numbers].contiguous().view(self.dtype).float()
        if not self.groups:
            return numbers
        scale = _at_the_beginning(rows[:, self._numbers : self._scales]).view(torch.float32)
        return numbers * scale.repeat_interleave(NUMBERS_PER_SCALE, dim=1)[:, : self.width]

    def gate_weights(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[row, weight] of uint8[row, byte]."""
        return _at_the_beginning(rows[:, self._scales :]).view(torch.float32)

    def rounded(self, vectors: torch.Tensor) -> torch.Tensor:
        """[row, width]: these vectors as they arrive, in their own format."""
        if self.dtype == vectors.dtype:
            return vectors
        weights = vectors.new_zeros((len(vectors), self.weights)) if self.weights else None
        return self.unpack(self.pack(vectors, weights)).to(vectors.dtype)

    def summed(self, rows: torch.Tensor, into: torch.Tensor, count: int) -> torch.Tensor:
        """uint8[count, byte]: rows summed in fp32 into those they go on as.

        rows: uint8[row, byte]
        into: int64[row], the sum that each row goes into
        """
        numbers = self.unpack(rows)
        return self.pack(numbers.new_zeros((count, self.width)).index_add_(0, into, numbers))

    def _scaled(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """8-bit numbers, and the scales of their groups: the largest number of a group becomes the largest of the format."""
        missing = self.groups * NUMBERS_PER_SCALE - self.width
        padded = torch.nn.functional.pad(vectors.float(), (0, missing))
        grouped = padded.view(len(vectors), self.groups, NUMBERS_PER_SCALE)
        scale = (grouped.abs().amax(dim=2) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        numbers = (grouped / scale[:, :, None]).clamp(-LARGEST, LARGEST).to(FP8)
        return numbers.flatten(1)[:, : self.width], scale


def _at_the_beginning(part: torch.Tensor) -> torch.Tensor:
    """A part of rows in memory of its own: only bytes that begin at a multiple of a number's size can be read as such
    numbers."""
    return part.clone(memory_format=torch.contiguous_format)


def wires_of(travel: Travel, model: MoEModel) -> tuple[Wire, Wire]:
    """The rows of dispatch and of combine of a model in the format it is computed in."""
    weights = 0 if travel.unit == "copies" else model.experts_per_token
    return (Wire(travel.dispatch or model.dtype, model.d_model, weights), Wire(travel.combine or model.dtype, model.d_model))
