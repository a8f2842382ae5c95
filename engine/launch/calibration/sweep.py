"""The measurements of a calibration, and the part of them that fits into the available time."""

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from pydantic import Field

from engine.costs.measured import Dtype
from engine.schema import Frozen

M = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N = (8, 32, 128, 512, 1536, 4096, 8192, 16384)
K = (128, 512, 1536, 4096, 8192, 16384)
"""Sizes of C[m, n] = A[m, k] B[k, n] from a router's few columns to the widest experts. With the silicon tables of
A100, H100, H200 and B200 as the truth, sizes in between are met to 7 to 10 % on average, about as well as the tables'
own noise allows: three times as many points gain less than one percent."""

CAPS = (
    (16384, 16384, 16384),
    (8192, 16384, 8192),
    (8192, 8192, 8192),
    (4096, 8192, 8192),
    (2048, 8192, 4096),
    (2048, 4096, 4096),
    (512, 4096, 4096),
    (512, 1536, 1536),
    (128, 1536, 1536),
    (128, 512, 512),
)
"""Largest m, n and k of the grids that are tried in turn until one fits."""

PROBES = (128, 256, 512, 1024, 2048, 4096)
"""Sides of the cubes that show how fast the device is; the first that takes `PROBE_SECONDS` is the last."""
PROBE_SECONDS = 2e-3

BATCH_SECONDS = 1e-3
"""Seconds for which work is repeated for one reading of the clock."""
WARM_UPS = 2

SMALLEST, FACTOR, LARGEST = 2**10, 4, 2**28
"""Bytes of the smallest and the largest buffer of collectives and of passes over memory, and the factor between two sizes."""
LEAST_SIZES = 3
"""Sizes that are measured even if the time is up: a line through fewer says nothing of its error."""

PARTS = {"gemm": 0.55, "held_out": 0.1, "memory": 0.05, "all_to_all": 0.1, "exchange": 0.05, "all_reduce": 0.15}
"""Shares of the time."""
COLLECTIVES = ("all_to_all", "exchange", "all_reduce")

MAX_RANKS = 64

REQUEST, MEASURED = "sweep.json", "measured.json"
"""Files of a calibration: the request to the ranks, and their measurements."""


class Sweep(Frozen):
    """The request to the ranks of a calibration.

    dtypes: of the GEMMs, the first also of the passes over memory
    seconds: about the length of the measuring
    """

    ranks: int = Field(ge=1, le=MAX_RANKS)
    backend: Literal["gloo", "nccl"]
    dtypes: tuple[Dtype, ...] = Field(min_length=1)
    seconds: float = Field(gt=0)
    repeats: int = Field(ge=1)
    held_out: int = Field(ge=1)
    seed: int = 0

    @property
    def limit(self) -> float:
        """Seconds after which it is given up: a machine under load may take longer than planned."""
        return 120.0 + 10 * self.seconds

    def allowance(self, part: str) -> float:
        """Seconds for a part; without peers, the collectives' seconds go to the others."""
        there = [name for name in PARTS if self.ranks > 1 or name not in COLLECTIVES]
        return self.seconds * PARTS[part] / sum(PARTS[name] for name in there)


@dataclass(frozen=True)
class Speed:
    """The result of the probes.

    start_up: seconds of the shortest GEMM
    multiply_add: seconds of one multiply-add in the fastest
    bookkeeping: seconds of the rank's bookkeeping for one shape (n, k)
    """

    start_up: float
    multiply_add: float
    bookkeeping: float


@dataclass(frozen=True)
class Grid:
    """A grid of GEMMs, one for each m, n and k."""

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(n, k), the small ones first."""
        return sorted(product(self.n, self.k), key=lambda shape: (shape[0] * shape[1], shape))

    @property
    def numbers(self) -> int:
        """Numbers of the largest A, B and C together."""
        m, n, k = self.m[-1], self.n[-1], self.k[-1]
        return m * k + k * n + m * n

    def seconds(self, speed: Speed, repeats: int) -> float:
        """Approximate seconds to measure all of it."""
        work = np.multiply.outer(np.multiply.outer(self.m, self.n), self.k).astype(np.float64)
        each = np.maximum(speed.start_up, work * speed.multiply_add)
        spent = WARM_UPS * each + repeats * np.maximum(each, BATCH_SECONDS)
        return float(spent.sum()) + speed.bookkeeping * len(self.n) * len(self.k)


def grids() -> list[Grid]:
    """All grids, the most telling first: a smaller one reaches less far, and of two that reach as far the second has
    every second size."""
    every_grid = []
    for caps in CAPS:
        whole = [tuple(size for size in sizes if size <= cap) for sizes, cap in zip((M, N, K), caps, strict=True)]
        every_grid.append(Grid(*whole))
        every_grid.append(Grid(*((*sizes[:-1:2], sizes[-1]) for sizes in whole)))  # with both ends
    return every_grid


def grid_for(speed: Speed, seconds: float, repeats: int, room: float) -> Grid:
    """The first grid that can be measured in so many seconds with matrices of at most `room` numbers together; the last
    one if none can."""
    known = grids()
    fitting = (grid for grid in known if grid.seconds(speed, repeats) <= seconds and grid.numbers <= room)
    return next(fitting, known[-1])


def held_out_shapes(grid: Grid, count: int, seed: int) -> list[tuple[int, int, int]]:
    """(m, n, k) inside the grid but not of it, drawn evenly in the logarithms; n and k are multiples of 8, as models' are."""
    rng = np.random.default_rng(seed)
    taken = set(product(grid.m, grid.n, grid.k))
    shapes: list[tuple[int, int, int]] = []
    while len(shapes) < count:
        m, n, k = (round(math.exp(rng.uniform(math.log(sizes[0]), math.log(sizes[-1])))) for sizes in (grid.m, grid.n, grid.k))
        shape = (m, max(8, round(n / 8) * 8), round(k / 8) * 8)
        if shape not in taken:
            shapes.append(shape)
            taken.add(shape)
    return shapes


def buffer_sizes() -> list[int]:
    """Bytes of the buffers of collectives and passes over memory, ascending."""
    return [SMALLEST * FACTOR**power for power in range(1 + round(math.log(LARGEST / SMALLEST, FACTOR)))]
