"""Measured times of operations, as they come from a profiler or a benchmark, and lines fitted to them."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from engine.costs.alpha_beta import CostProfile, Line, fit_line
from engine.errors import InputError
from engine.schema import Amount, Frozen, Seconds

MAX_POINTS = 1_000_000

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Point = tuple[Amount, Seconds]
"""(bytes, seconds)."""
GemmPoint = tuple[Amount, Amount, Amount, Seconds]
"""(m, n, k, seconds)."""


class GemmTimes(Frozen):
    """GEMMs C[m, n] = A[m, k] B[k, n] on one type of GPU."""

    gpu: str = Field(min_length=1, max_length=80)
    dtype: Dtype
    points: tuple[GemmPoint, ...] = Field(min_length=1, max_length=MAX_POINTS)


class MemoryTimes(Frozen):
    """Passes over the memory of one type of GPU."""

    gpu: str = Field(min_length=1, max_length=80)
    points: tuple[Point, ...] = Field(min_length=1, max_length=MAX_POINTS)


class CollectiveTimes(Frozen):
    """A collective over all of `ranks` GPUs. Sizes are the bytes of the buffer that each of them holds; of an all-to-all its
    own part is included, as nccl-tests counts it. send_receive: each sends its buffer to one peer while another sends to it."""

    operation: Literal["all_to_all", "all_reduce", "send_receive"]
    ranks: int = Field(ge=2, le=1_000_000)
    points: tuple[Point, ...] = Field(min_length=1, max_length=MAX_POINTS)


class ExchangeTimes(Frozen):
    """Kernels of DeepEP in a profile: their number and their times, but not the tokens they moved, so that no cost is read off
    them.

    gpus, nodes, width (of a token, elements): as far as the profile says
    median, low, high: seconds of one launch; half, a tenth and nine tenths of them take at most that
    """

    kernels: Literal["intranode", "internode", "low-latency"]
    part: Literal["notify", "dispatch", "combine"]
    gpus: int | None = Field(default=None, ge=1)
    nodes: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    launches: int = Field(ge=1)
    median: Seconds
    low: Seconds
    high: Seconds


class MeasuredTimes(Frozen):
    """Measured times by operation; each part may be absent, but not all."""

    kind: Literal["measured times"] = "measured times"
    name: str = Field(min_length=1, max_length=80)
    origin: str = Field(min_length=1, max_length=300, description="where and how it was measured")
    gemm: tuple[GemmTimes, ...] = ()
    memory: tuple[MemoryTimes, ...] = ()
    collectives: tuple[CollectiveTimes, ...] = ()
    exchanges: tuple[ExchangeTimes, ...] | None = None
    notes: tuple[Annotated[str, Field(max_length=1000)], ...] | None = Field(
        default=None, description="what of the file was left out, and what to know of it"
    )

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        keys = [("GEMM", times.gpu, times.dtype) for times in self.gemm]
        keys += [("memory", times.gpu) for times in self.memory]
        keys += [(collective.operation, f"{collective.ranks} ranks") for collective in self.collectives]
        if not keys and not self.exchanges:
            raise ValueError("no times in it")
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"two entries for {' '.join(twice)}; put their points together")
        return self

    def collective(self, operation: str, ranks: int) -> CollectiveTimes | None:
        """The times of a collective over `ranks` GPUs, None where they were not measured."""
        asked = operation, ranks
        return next((times for times in self.collectives if (times.operation, times.ranks) == asked), None)

    def ranks_of(self, operation: str) -> list[int]:
        """Numbers of GPUs over which a collective was measured, ascending."""
        return sorted(collective.ranks for collective in self.collectives if collective.operation == operation)


def medians(points: Iterable[tuple[float, ...]]) -> tuple[tuple[float, ...], ...]:
    """(size, …, seconds) points with every size once, at the median of its times; ascending."""
    times: dict[tuple[float, ...], list[float]] = {}
    for *size, seconds in points:
        times.setdefault(tuple(size), []).append(seconds)
    return tuple((*size, float(np.median(repeats))) for size, repeats in sorted(times.items()))


def sent_line(times: CollectiveTimes) -> Line:
    """The α–β line of an all-to-all over the bytes that one GPU sends to the others. Raises InputError when all sizes are
    the same."""
    size, seconds = np.array(times.points).T
    return fit_line(size * (times.ranks - 1) / times.ranks, seconds)


def fit_profile(measured: MeasuredTimes, dtype: Dtype = "bf16") -> CostProfile:
    """Lines fitted to the measured times (PipeMoE §V-B); each says its mean relative error.

    GEMMs are those of `dtype`, with 16-bit numbers standing for each other; the network is the all-to-all over the most
    GPUs that were measured. Raises InputError when nothing can be fitted or an operation has one size only.
    """
    alike = {"bf16", "fp16"} if dtype in ("bf16", "fp16") else {dtype}
    gemm = {}
    for times in sorted(measured.gemm, key=lambda times: times.dtype == dtype):  # an exact dtype comes last and stays
        if times.dtype in alike:
            m, n, k, seconds = np.array(times.points).T
            gemm[times.gpu] = fit_line(m * n * k, seconds)
    memory = {times.gpu: fit_line(*np.array(times.points).T) for times in measured.memory}
    ranks = max(measured.ranks_of("all_to_all"), default=None)
    network = sent_line(measured.collective("all_to_all", ranks)) if ranks else None
    if not gemm and network is None:
        raise InputError(f"{measured.name}: neither GEMMs of {dtype} nor an all-to-all to fit a profile to")
    reduced = measured.collective("all_reduce", ranks) if ranks else None
    all_reduce = fit_line(*np.array(reduced.points).T) if reduced else None
    about = {"name": measured.name, "origin": measured.origin, "ranks": ranks or 1, "cores": ranks or 1}
    return CostProfile(**about, gemm=gemm, memory=memory, network=network, all_reduce=all_reduce)
