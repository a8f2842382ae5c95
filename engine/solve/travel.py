"""`travel`: the rows that every GPU sends in one dispatch, when tokens travel copy by copy, GPU by GPU or node by node."""

import time
from typing import Any, Literal

import numpy as np
from pydantic import Field

from engine.communication.travel import Stops, rows_of_tokens
from engine.errors import InputError
from engine.network import off_diagonal
from engine.result import Provenance, Result, Status, Stop, library_versions
from engine.schema import Frozen
from engine.solve.instance import Face, Options

MOST_GPUS = 1024
"""Two matrices of GPUs are answered, which with more would be hundreds of megabytes of text."""


class TravelInstance(Frozen):
    experts: tuple[tuple[int, ...], ...] = Field(min_length=1)
    source_gpu: tuple[int, ...]
    gpu_of_expert: tuple[int, ...] = Field(min_length=1, max_length=4096)
    gpus: int = Field(ge=1, le=MOST_GPUS)
    gpus_per_node: int = Field(ge=1, le=MOST_GPUS)
    travel: Literal["copies", "gpu", "node"]


def _travel(instance: TravelInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    started = time.perf_counter()
    chosen, source, home = _checked(instance)
    node = np.arange(instance.gpus) // instance.gpus_per_node
    hosts = np.where(chosen >= 0, home[chosen], -1)
    rows = off_diagonal(rows_of_tokens(hosts, source, Stops(node), instance.travel))
    inside = node[:, None] == node[None, :]
    fabric, links = np.where(inside, 0.0, rows), np.where(inside, rows, 0.0)
    most = float(max(fabric.sum(axis=1).max(), fabric.sum(axis=0).max()))
    # Nothing is chosen here: the rows follow from the placement.
    provenance = Provenance(optimiser="travel", versions=library_versions())
    result = Result(Status.OPTIMAL, most, most, time.perf_counter() - started, rows, provenance)
    return result, {"fabric": fabric.tolist(), "links": links.tolist()}


def _checked(instance: TravelInstance) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64[token, k] experts, int64[token] sources and int64[expert] GPUs. Raises InputError where they do not fit."""
    if len({len(token) for token in instance.experts}) != 1 or not instance.experts[0]:
        raise InputError("experts must have the same number of choices for every token; -1 stands for none")
    chosen, source, home = (np.array(part) for part in (instance.experts, instance.source_gpu, instance.gpu_of_expert))
    if len(source) != len(chosen):
        raise InputError(f"source_gpu has {len(source)} entries for {len(chosen)} tokens")
    if instance.gpus % instance.gpus_per_node:
        raise InputError(f"{instance.gpus} GPUs do not divide into nodes of {instance.gpus_per_node}")
    for name, numbers, least, count in (
        ("experts", chosen, -1, len(home)),
        ("source_gpu", source, 0, instance.gpus),
        ("gpu_of_expert", home, 0, instance.gpus),
    ):
        if numbers.min() < least or numbers.max() >= count:
            raise InputError(f"{name} must lie in {least} … {count - 1}")
    return chosen, source, home


KERNELS: dict[str, Face] = {"travel": (TravelInstance, _travel)}
