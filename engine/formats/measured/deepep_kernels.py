"""DeepEP's kernels in profiler traces, by their names: `void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, …)`.

Namespaces are the three sets of kernels (csrc/kernels/api.cuh): intranode, internode, and internode_ll for low latency; those
of DeepSeek's own traces are called dpsk::ep and end in _ll. Of the template's numbers count: the first of intranode kernels,
the GPUs (intranode.cu); the first of internode ones, the nodes (internode.cu); the largest of those for low latency, the width
of a token (internode_ll.cu), which their other numbers never reach.

A name does not say how many tokens went, and no operator of PyTorch around the kernel does. Low-latency kernels with a receive
hook are launched twice, to send and to receive; each launch counts here. Waiting for a late rank is in the durations.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from engine.costs.measured import ExchangeTimes
from engine.units import seconds as seconds_in_words

Part = Literal["notify", "dispatch", "combine"]

_NAME = re.compile(r"\b(?:deep_ep|dpsk::ep)::(intranode|internode|internode_ll)::(\w+)\s*(?:<(.{0,400}?)>\s*\()?")
_PARTS: tuple[tuple[str, Part], ...] = (
    ("notify", "notify"),
    ("cached_notify", "notify"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
)
"""By what a kernel's name begins with. Others, such as barriers, exchange nothing."""
_NUMBER = re.compile(r"\s*(?:\((?:unsigned )?(?:int|long)\))?\s*(\d{1,9})[uUlL]*\s*")
MIN_WIDTH = 512


class ExchangeKernel(NamedTuple):
    """What a kernel's name says. kernels: the set that it is of; gpus, nodes, width: None where it does not say."""

    kernels: Literal["intranode", "internode", "low-latency"]
    part: Part
    gpus: int | None
    nodes: int | None
    width: int | None


def kernel_of(name: str) -> ExchangeKernel | None:
    """The exchange that a kernel of this name is part of, None for others."""
    if (match := _NAME.search(name)) is None:
        return None
    place, function, arguments = match.groups()
    part = next((part for beginning, part in _PARTS if function.startswith(beginning)), None)
    if part is None:
        return None
    numbers = [int(found[1]) for text in (arguments or "").split(",") if (found := _NUMBER.fullmatch(text))]
    if place == "internode_ll" or function.endswith("_ll"):
        width = max(numbers, default=0)
        return ExchangeKernel("low-latency", part, None, None, width if width >= MIN_WIDTH else None)
    first = numbers[0] if numbers and numbers[0] > 0 else None
    if place == "intranode":
        return ExchangeKernel("intranode", part, first, None, None)
    return ExchangeKernel("internode", part, None, first, None)


def exchange_times(durations: Mapping[ExchangeKernel, Sequence[float]]) -> tuple[ExchangeTimes, ...]:
    """By kind of kernel how often it ran and how long that took. durations: seconds of every launch."""
    times = []
    for kernel, seconds in durations.items():
        low, median, high = np.quantile(seconds, (0.1, 0.5, 0.9)).tolist()
        about = {key: value for key, value in kernel._asdict().items() if value is not None}
        times.append(ExchangeTimes(**about, launches=len(seconds), median=median, low=low, high=high))
    return tuple(times)


def in_words(times: ExchangeTimes) -> str:
    """`58 DeepEP intranode dispatch kernels over 8 GPUs: 131 µs in the median (…); …`."""
    over = f" over {times.gpus} GPUs" if times.gpus else f" over {times.nodes} nodes" if times.nodes else ""
    wide = f" of {times.width} wide tokens" if times.width else ""
    return (
        f"{times.launches} DeepEP {times.kernels} {times.part} kernels{over}{wide}: {seconds_in_words(times.median)} in the "
        f"median, {seconds_in_words(times.low)} to {seconds_in_words(times.high)} for four in five; a trace does not say how "
        "many tokens they moved, so nothing is timed by them"
    )
