"""The placement: the experts that each GPU holds in every MoE layer."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
from pydantic import Field, model_validator

from engine.schema import Frozen


class Placement(Frozen):
    """The experts on each GPU, per MoE layer. Replicas and different numbers of slots per GPU are allowed."""

    experts: int = Field(ge=1, le=4096)
    experts_of_gpu: tuple[tuple[tuple[int, ...], ...], ...] = Field(
        min_length=1, description="[MoE layer][gpu] -> the experts in its slots"
    )
    model_layers: tuple[int, ...] = Field(description="the model layer of every MoE layer")

    @model_validator(mode="after")
    def _every_expert_has_a_home(self) -> "Placement":
        if len(self.model_layers) != len(self.experts_of_gpu):
            raise ValueError("model_layers and experts_of_gpu must have one entry per MoE layer")
        gpus = len(self.experts_of_gpu[0])
        for layer, row in enumerate(self.experts_of_gpu):
            if len(row) != gpus:
                raise ValueError(f"layer {layer} is placed on {len(row)} GPUs, layer 0 on {gpus}")
            placed = {expert for slots in row for expert in slots}
            if missing := set(range(self.experts)) - placed:
                raise ValueError(f"layer {layer}: expert {min(missing)} is on no GPU")
            if unknown := placed - set(range(self.experts)):
                raise ValueError(f"layer {layer}: there is no expert {max(unknown)} (experts are 0 … {self.experts - 1})")
        return self

    @classmethod
    def from_slots(
        cls, slots: np.ndarray, slots_of_gpu: np.ndarray, experts: int, model_layers: tuple[int, ...]
    ) -> "Placement":
        """A placement with replicas.

        slots: int[layer, slot]; the expert in every slot, GPU after GPU
        slots_of_gpu: int[gpu]
        experts: logical experts of a layer
        model_layers: the model layer of every MoE layer
        """
        ends = np.cumsum(slots_of_gpu)[:-1]
        rows = tuple(tuple(tuple(part.tolist()) for part in np.split(row, ends)) for row in slots)
        return cls(experts=experts, experts_of_gpu=rows, model_layers=model_layers)

    @classmethod
    def from_gpu_of_expert(cls, gpu_of_expert: np.ndarray, gpus: int, model_layers: tuple[int, ...]) -> "Placement":
        """A placement without replicas.

        gpu_of_expert: int[layer, expert]
        gpus: number of GPUs
        model_layers: the model layer of every MoE layer
        """
        experts_of_gpu = []
        for row in gpu_of_expert:
            by_gpu = np.argsort(row, kind="stable")
            ends = np.searchsorted(row[by_gpu], np.arange(gpus + 1)).tolist()
            held = by_gpu.tolist()
            experts_of_gpu.append(tuple(tuple(held[begin:end]) for begin, end in pairwise(ends)))
        return cls(experts=gpu_of_expert.shape[1], experts_of_gpu=tuple(experts_of_gpu), model_layers=model_layers)

    @property
    def layers(self) -> int:
        return len(self.experts_of_gpu)

    @property
    def gpus(self) -> int:
        return len(self.experts_of_gpu[0])

    @cached_property
    def share(self) -> np.ndarray:
        """The part of an expert's tokens that each GPU serves: float64[layer, expert, gpu]; replicas share equally."""
        held = chain.from_iterable(experts for row in self.experts_of_gpu for experts in row)
        layer, gpu = np.divmod(np.repeat(np.arange(self.layers * self.gpus), self.slots.ravel()), self.gpus)
        cell = (layer * self.experts + np.fromiter(held, np.int64, len(layer))) * self.gpus + gpu
        shape = self.layers, self.experts, self.gpus
        # As floats at once: with a thousand layers every table of this shape counts.
        share = np.bincount(cell, np.ones(len(cell)), self.layers * self.experts * self.gpus).reshape(shape)
        share /= share.sum(axis=2, keepdims=True)
        return share

    @cached_property
    def single(self) -> bool:
        """True if no expert has a replica."""
        return bool(np.all((self.share > 0).sum(axis=2) == 1))

    @property
    def gpu_of_expert(self) -> np.ndarray:
        """The GPU of each expert: int64[layer, expert]; the first one of an expert with replicas."""
        return (self.share > 0).argmax(axis=2)

    def hosts(self, layer: int, experts: np.ndarray) -> np.ndarray:
        """The GPU that serves every choice of a layer's tokens: int64[token, k]. Tokens go to the copies of an expert in turn.

        layer: MoE layer
        experts: int[token, k]; the choices, -1 = none, which stays -1
        """
        row = self.experts_of_gpu[layer]
        slots = np.fromiter(chain.from_iterable(row), np.int64, int(self.slots[layer].sum()))
        gpu_of_slot = np.repeat(np.arange(self.gpus), self.slots[layer])[np.argsort(slots, kind="stable")]
        copies = np.bincount(slots, minlength=self.experts)
        begin = np.cumsum(copies) - copies
        chosen = experts.astype(np.int64)
        slot = begin[chosen]
        if (copies > 1).any():
            flat = chosen.ravel()
            by_expert = np.argsort(flat, kind="stable")
            ordered = flat[by_expert]
            turn = np.empty(len(flat), dtype=np.int64)
            turn[by_expert] = np.arange(len(flat)) - np.searchsorted(ordered, ordered)
            slot = slot + turn.reshape(chosen.shape) % copies[chosen]
        return np.where(chosen >= 0, gpu_of_slot[slot], -1)

    def moved_experts(self, other: "Placement") -> int | None:
        """The number of (layer, expert, GPU) copies of `other` that this placement does not have; None for other sizes."""
        if (self.layers, self.gpus, self.experts) != (other.layers, other.gpus, other.experts):
            return None
        return int(((other.share > 0) & (self.share == 0)).sum())

    @cached_property
    def slots(self) -> np.ndarray:
        """Expert slots in use: int64[layer, gpu]."""
        return np.array([[len(experts) for experts in row] for row in self.experts_of_gpu], dtype=np.int64)


def together(placements: Sequence[Placement]) -> Placement:
    """The placement in which every GPU holds all that it holds in any of these, of one model and as many GPUs: each expert in
    one slot, in ascending order."""
    layers = zip(*(placement.experts_of_gpu for placement in placements), strict=True)
    held = tuple(tuple(tuple(sorted(set(chain(*slots)))) for slots in zip(*rows, strict=True)) for rows in layers)
    return placements[0].model_copy(update={"experts_of_gpu": held})


def redundant_experts(experts: int, spare: int, gpus: int) -> list[int]:
    """The numbers of redundant experts of a layer nearest to a wanted one with which slots divide by GPUs, as engines need it:
    one if it does so itself, else the next below and above, ascending, none below 0."""
    over = (experts + spare) % gpus
    return [near for near in sorted({spare - over, spare + -(experts + spare) % gpus}) if near >= 0]


def expert_groups(placement: Placement) -> int:
    """Number of groups of neighbouring GPUs that hold every expert exactly once in every layer; 1 for other replicas."""
    slots, gpus = placement.slots, placement.gpus
    copies = slots[0].sum() / placement.experts
    groups = int(copies)
    if groups < 2 or groups != copies or gpus % groups or np.any(slots.sum(axis=1) != slots[0].sum()):
        return 1
    size = gpus // groups
    for row in placement.experts_of_gpu:
        for first in range(0, gpus, size):
            held = [expert for experts in row[first : first + size] for expert in experts]
            if sorted(held) != list(range(placement.experts)):
                return 1
    return groups
