"""The cluster: nodes of GPUs of any mix of types on one non-blocking fabric, with optional faster links in a node.

`Efficiency` is the share of its rate that a port reaches when several sends meet there: incast, and queue pairs that compete
for one card.
"""

from functools import cached_property
from itertools import pairwise
from typing import Annotated, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from engine.schema import Frozen, Memory, Rate, StartUp
from engine.units import share

MEMORY_SHARE = 0.9
"""Part of a GPU's memory that expert weights may take; the rest is for activations, buffers and the runtime."""

Point = tuple[Annotated[int, Field(ge=1, le=1_000_000)], Annotated[float, Field(gt=0, le=1)]]
"""(sends that meet at a port, share of its rate that they reach together)."""

ALL = ((1, 1.0),)
"""The points of a port that keeps its full rate."""


class Efficiency(Frozen):
    """The share of its rate that a port reaches, by the number of sends that meet there, for each direction on its own.

    fabric: points of the ports to the fabric, more sends never faster
    links: points of the ports to the links inside nodes, likewise
    origin: source of the points

    Between two points the time that a byte takes (1 / share) is a straight line; before the first and after the last point the
    share stays. The loss of short messages is a start-up time, so it is part of the latency of a cluster or node.
    """

    fabric: tuple[Point, ...] = Field(default=ALL, min_length=1, max_length=1000)
    links: tuple[Point, ...] = Field(default=ALL, min_length=1, max_length=1000)
    origin: str = Field(default="stated", min_length=1, max_length=300)

    @model_validator(mode="after")
    def _falls(self) -> Self:
        for name in ("fabric", "links"):
            sends, share = zip(*getattr(self, name), strict=True)
            if any(later <= earlier for earlier, later in pairwise(sends)):
                raise ValueError(f"{name}: list the points by ascending numbers of sends, each number once")
            if any(later > earlier for earlier, later in pairwise(share)):
                raise ValueError(f"{name}: more sends cannot reach a larger share of a port's rate")
        return self

    @property
    def is_none(self) -> bool:
        """True if ports always reach their whole rate."""
        return all(share == 1 for points in (self.fabric, self.links) for _, share in points)

    @property
    def in_words(self) -> str:
        """`ports reach 90 % of their rate with one send, 52 % with 8; links 80 %`."""
        said = [
            f"{name} keep their full rate (assumed)" if points == ALL else f"{name} reach {_said(points)}"
            for name, points in (("ports", self.fabric), ("links", self.links))
        ]
        return "; ".join(said) + f" ({self.origin})"

    def table(self, most: int) -> np.ndarray:
        """float64[2, most]: shares of the fabric's ports and of the links', with 1 … most sends."""
        return np.stack([shares(points, np.arange(1, most + 1)) for points in (self.fabric, self.links)])


def shares(points: tuple[Point, ...], sends: np.ndarray) -> np.ndarray:
    """The share of a port's rate that so many sends reach together: float64[...].

    points: see `Efficiency`
    sends: integers[...]
    """
    at, share = np.array(points).T
    return 1 / np.interp(sends, at, 1 / share)


def contention_points(contention: float, most: int) -> tuple[Point, ...]:
    """The points of a port at which every further send slows all bytes down: a share of 1 / (1 + contention (sends - 1)).

    contention: the longer time of a byte for each further send; 0.1 is ten per cent
    most: sends of the last point
    """
    return ALL if most < 2 else (*ALL, (most, 1 / (1 + contention * (most - 1))))


def _said(points: tuple[Point, ...]) -> str:
    (first, alone), (last, crowded) = points[0], points[-1]
    if alone == crowded:
        return "their full rate" if alone == 1 else f"{share(alone)} of their rate"
    return f"{share(alone)} of their rate with {first} send{'s' if first > 1 else ''}, {share(crowded)} with {last}"


MOST_GPUS = 4096
"""Tables with a cell for every pair of GPUs must fit in memory."""
BITS_PER_DTYPE = {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8}


def _no_formula(name: str) -> str:
    """A name that is safe in a table of GPUs, which may be downloaded."""
    if name.startswith(("=", "+", "-", "@")):
        raise ValueError("must not begin with =, +, - or @: a spreadsheet would take it for a formula")
    return name


class Gpu(Frozen):
    """One accelerator. Bandwidths in bytes/s, memory in bytes, dense peak rates in FLOP/s."""

    type: Annotated[str, AfterValidator(_no_formula)] = Field(min_length=1, max_length=40)
    memory: Memory
    memory_bandwidth: Rate
    flops_fp32: Rate
    flops_fp16: Rate = Field(description="dense rate at 16 bits (fp16, and bf16 where the chip has it)")
    flops_tf32: Rate | None = Field(
        default=None, description="dense rate of 32-bit data on tensor cores (TF32); absent: none, flops_fp32 holds"
    )
    flops_fp8: float = Field(default=0, ge=0, le=1e18, description="0: no 8-bit units, 8-bit data computes at the 16-bit rate")
    send_bandwidth: Rate = Field(description="to the fabric")
    receive_bandwidth: Rate = Field(description="from the fabric")

    def flops(self, dtype: str) -> float:
        """Dense peak FLOP/s for numbers of `dtype`.

        tf32 is 32 bits wide in memory and on the network, and multiplied on the tensor cores where the chip can (PyTorch's
        default for matrix products up to version 1.11).
        """
        bits = BITS_PER_DTYPE[dtype]
        if dtype == "tf32" and self.flops_tf32:
            return self.flops_tf32
        if bits == 32:
            return self.flops_fp32
        return self.flops_fp8 if bits == 8 and self.flops_fp8 > 0 else self.flops_fp16


class Node(Frozen):
    """GPUs of one machine. With `link_bandwidth` they reach each other over links of their own (NVLink, PCIe) that do
    not load the fabric; without it they meet on the fabric like all other GPUs (Aurora's big switch)."""

    name: Annotated[str, AfterValidator(_no_formula)] = Field(min_length=1, max_length=60)
    gpus: tuple[Gpu, ...] = Field(min_length=1)
    link_bandwidth: Rate | None = Field(default=None, description="bytes/s per GPU and direction")
    link_latency: StartUp = Field(default=0, description="seconds to start one transfer inside the node")


class Cluster(Frozen):
    """Nodes on one fabric. GPUs are numbered from 0 in the order of the nodes."""

    name: str = Field(min_length=1, max_length=80)
    nodes: tuple[Node, ...] = Field(min_length=1)
    latency: StartUp = Field(default=0, description="seconds to start one transfer over the fabric")
    efficiency: Efficiency | None = Field(default=None, description="share of their rates that ports reach; absent: all")

    @model_validator(mode="after")
    def _bearable(self) -> "Cluster":
        if (gpus := sum(len(node.gpus) for node in self.nodes)) > MOST_GPUS:
            raise ValueError(f"{gpus} GPUs are more than the limit of {MOST_GPUS}")
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> "Cluster":
        names = [node.name for node in self.nodes]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two nodes are called '{twice}'; give every node its own name")
        return self

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU, in rank order."""
        return tuple(gpu for node in self.nodes for gpu in node.gpus)

    @cached_property
    def node_of_gpu(self) -> np.ndarray:
        """The index of each GPU's node: int64[gpu]."""
        return np.repeat(np.arange(len(self.nodes)), [len(node.gpus) for node in self.nodes])

    @property
    def node_sizes(self) -> list[int]:
        """GPUs of every node."""
        return [len(node.gpus) for node in self.nodes]

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """Lane names such as `GPU 3 · A100-40`."""
        return tuple(f"GPU {rank} · {gpu.type}" for rank, gpu in enumerate(self.gpus))

    @property
    def reached_in_words(self) -> str:
        """The rate that ports reach where several sends meet, for people."""
        if self.efficiency is None:
            return "ports keep their full rate however many sends share them (assumed)"
        return self.efficiency.in_words

    def part(self, gpus: list[int]) -> "Cluster":
        """The cluster of only these GPUs (indices, ascending), on the same nodes and fabric."""
        kept, first = [], 0
        for node in self.nodes:
            own = tuple(gpu for rank, gpu in enumerate(node.gpus, start=first) if rank in gpus)
            first += len(node.gpus)
            if own:
                kept.append(node.model_copy(update={"gpus": own}))
        return self.model_copy(update={"nodes": tuple(kept)})

    def values(self, field: str) -> np.ndarray:
        """One numeric field of every GPU, for example `send_bandwidth`: float64[gpu]."""
        return np.array([getattr(gpu, field) for gpu in self.gpus], dtype=np.float64)


def any_gpus(count: int) -> Cluster:
    """A cluster of `count` alike GPUs without links, for code that only needs their number: memory for everything, rates
    without a meaning."""
    rates = {"memory_bandwidth": 1e12, "flops_fp32": 1e13, "flops_fp16": 1e14}
    gpu = Gpu(type="rank", memory=2.0**60, **rates, send_bandwidth=1e10, receive_bandwidth=1e10)
    return Cluster(name="ranks", nodes=(Node(name="ranks", gpus=(gpu,) * count),))
