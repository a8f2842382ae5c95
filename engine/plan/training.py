"""The parts of a plan for a training step: cuts of operators, overlaps, and priority on the network."""

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from engine.schema import Frozen


class Pipeline(Frozen):
    """The number of parts that the tokens of every MoE layer are cut into from dispatch to combine, so that communication and
    expert computation of different parts overlap (PipeMoE).

    order: of the parts on the network; "dispatch-first": every dispatch before the first combine; "interleaved": D1 D2 C1 D3
        C2 …
    """

    forward: tuple[int, ...] = Field(description="degree per MoE layer")
    backward: tuple[int, ...] = Field(description="degree per MoE layer")
    order: Literal["dispatch-first", "interleaved"] = "dispatch-first"

    @model_validator(mode="after")
    def _degrees(self) -> "Pipeline":
        if len(self.forward) != len(self.backward):
            raise ValueError("forward and backward must have one degree per MoE layer each")
        if any(not 1 <= degree <= 4096 for degree in self.forward + self.backward):
            raise ValueError("a degree must lie in 1 … 4096")
        return self


class PartitionRange(Frozen):
    """Operators `first` … `last` of the program, all cut in `parts` and run as a pipeline (Lancet §5)."""

    first: str = Field(min_length=1)
    last: str = Field(min_length=1)
    parts: int = Field(ge=2, le=4096)


class Overlap(Frozen):
    """Overlaps in a training step (Lancet). Operators go by their names in the operator graph.

    ranges: stretches of the forward pass that are cut
    under: weight-gradient operator -> the all-to-all that it runs under
    irregular: True if all-to-alls carry only real tokens, not buffers filled up to the capacity, behind an exchange of their
        sizes in the forward pass (Lancet §6)
    """

    ranges: tuple[PartitionRange, ...] = ()
    under: dict[str, str] = Field(default_factory=dict)
    irregular: bool = False


class Offload(Frozen):
    """Experts in the host's memory (Lina §4.2, after ZeRO-Offload): weights, gradients and momentum of some experts of every
    GPU lie there. A layer's weights are copied to the GPU before its forward and its backward pass, its gradients back, and
    the host updates these experts.

    experts: of every GPU in every layer; a GPU with fewer has all of them there
    """

    experts: int = Field(ge=1, le=4096)

    def on_host(self, slots: np.ndarray) -> np.ndarray:
        """int64[layer, gpu]: experts in the host's memory, of `slots` int64[layer, gpu] that a GPU has."""
        return np.minimum(self.experts, slots)

    def passing(self, slots: np.ndarray) -> np.ndarray:
        """int64[gpu]: experts of the host that a GPU has room for: those of two layers, one at work and one on its way."""
        return np.sort(self.on_host(slots), axis=0)[-2:].sum(axis=0)

    def staying(self, slots: np.ndarray) -> np.ndarray:
        """int64[gpu]: experts of all layers in a GPU's own memory."""
        return (slots - self.on_host(slots)).sum(axis=0)


class Priority(Frozen):
    """The rule for the network of a training step when all-to-alls and all-reduces of gradients meet (Lina §4).

    policy: see `engine.simulate.streams`
    bucket: bytes; gradients are fused until they reach this size, as PyTorch's DistributedDataParallel does
    micro_op: bytes; every gradient is cut in equal pieces of at most this size

    Exactly one of bucket and micro_op is given.
    """

    policy: Literal["fair", "priority", "fifo", "fixed"]
    bucket: float | None = Field(default=None, gt=0, description="bytes")
    micro_op: float | None = Field(default=None, gt=0, description="bytes")

    @model_validator(mode="after")
    def _one_of_both(self) -> "Priority":
        if (self.bucket is None) == (self.micro_op is None):
            raise ValueError("all-reduces are either fused to a bucket size or cut to a micro-op size")
        return self
