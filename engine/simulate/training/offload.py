"""Experts in the host's memory during a training step (Lina §4.2, after ZeRO-Offload): what a GPU still holds, and the copies.

A layer's weights come in before its experts run, forward and again backward, as soon as there is room: a GPU keeps those of the
last two layers that it used. The gradients leave when they are complete, summed up if other GPUs hold the same experts, and the
host updates the weights with the momentum that it keeps. Copies in and out run at once, over a link of the GPU's own that no
collective uses.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.overlap.operator_graph import UPDATE_BYTES
from engine.plan import Offload, Placement
from engine.problem import Problem
from engine.simulate.scheduler import HOST_BANDWIDTH, HOST_START_UP

HOST_UPDATE = 25e9
"""Bytes/s of the host's memory for the update of one GPU's experts, assumed: a quarter of the 100 GB/s that two processors
reach, for each of four GPUs."""


@dataclass(frozen=True)
class Copies:
    """The experts of one layer that pass through a GPU.

    layer: of the model
    moved: float64[group] seconds: the weights in, or the gradients out
    updated: float64[group] seconds of the host
    sent: bytes one way, on the GPU with most
    """

    layer: int
    moved: np.ndarray
    updated: np.ndarray
    sent: float


def copies_of(problem: Problem, placement: Placement, offload: Offload, firsts: list[int]) -> list[Copies]:
    """The copies of every MoE layer. firsts: a GPU of each group. Raises InputError where the operators of the step were
    imported, whose experts are not known by layer."""
    if problem.graph is not None:
        raise InputError(
            "experts in the host's memory are simulated for a model's own step, not for an imported operator graph"
        )
    size, numbers = problem.model.bytes_per_expert, problem.model.bytes_per_expert / problem.model.bytes_per_number
    found = []
    for layer, on_host in zip(placement.model_layers, offload.on_host(placement.slots), strict=True):
        sent = on_host[firsts] * size
        moved = np.where(sent > 0, HOST_START_UP + sent / HOST_BANDWIDTH, 0.0)
        updated = on_host[firsts] * numbers * UPDATE_BYTES / HOST_UPDATE
        found.append(Copies(layer, moved, updated, float(on_host.max() * size)))
    return found


def numbers_on_host(problem: Problem, placement: Placement, offload: Offload) -> np.ndarray:
    """float64[gpu]: weights that the host updates."""
    per_expert = problem.model.bytes_per_expert / problem.model.bytes_per_number
    return offload.on_host(placement.slots).sum(axis=0) * per_expert


def visits(layers: list[int]) -> Iterator[tuple[str, int, tuple[str, int] | None, bool]]:
    """Passes through MoE layers in their order, as (pass, layer, the pass through another layer that has to be over before this
    one's weights come in, or None if there is room from the start; True if the weights are there already).

    layers: forwards
    """
    there: list[tuple[str, int]] = []
    for turn in [("forward", layer) for layer in layers] + [("dx", layer) for layer in reversed(layers)]:
        known = [place for place, (_, layer) in enumerate(there) if layer == turn[1]]
        before = None
        if known:
            del there[known[0]]
        elif len(there) == 2:
            before = there.pop(0)
        there.append(turn)
        yield *turn, before, bool(known)


def state_bytes(
    slots: np.ndarray, dense: float, per_expert: float, offload: Offload | None, number: float, whole: float
) -> np.ndarray:
    """float64[gpu]: bytes of weights, gradients and momentum in the GPUs' memory.

    slots: int64[layer, gpu], experts of a GPU
    dense, per_expert: weights outside the experts, and of an expert
    number, whole: bytes of a weight, and with its gradient and momentum
    """
    if offload is None:
        return (slots.sum(axis=0) * per_expert + dense) * whole
    passing = offload.passing(slots) * per_expert * 2 * number  # weights and gradients
    return (offload.staying(slots) * per_expert + dense) * whole + passing


def fewest_on_host(held: np.ndarray, room: np.ndarray, most: int) -> int | None:
    """The fewest experts of a layer on the host with which every GPU's bytes fit its room; None if none do.

    held: float64[most + 1, gpu] bytes with 0, 1, … experts on the host
    room: float64[gpu] bytes
    """
    return next((count for count in range(most + 1) if (held[count] <= room).all()), None)
