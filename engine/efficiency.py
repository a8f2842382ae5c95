"""What part of its rate a port reaches when several sends meet there: incast, and queue pairs that fight for one card."""

from itertools import pairwise
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from engine.schema import Frozen
from engine.units import share

Point = tuple[Annotated[int, Field(ge=1, le=1_000_000)], Annotated[float, Field(gt=0, le=1)]]
"""(sends that meet at a port, share of its rate that they reach together)."""

ALL = ((1, 1.0),)


class Efficiency(Frozen):
    """The share of its rate that a port reaches, by the number of sends that meet there, of both ways each on its own.

    fabric, links: points of the ports to the fabric and of those of the links inside nodes, more sends never faster. Between
    two points the time that a byte takes (1 / share) is a straight line; before the first and after the last point the share
    stays. origin: where the points are from.

    What a message loses for being short is a start-up time, so it is part of the latency of a cluster or node.
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
        """Whether ports always reach their whole rate."""
        return all(share == 1 for points in (self.fabric, self.links) for _, share in points)

    @property
    def in_words(self) -> str:
        """`ports reach 90 % of their rate with one send, 52 % with 8; links 80 %`."""
        said = [f"{name} reach {_said(points)}" for name, points in (("ports", self.fabric), ("links", self.links))]
        return "; ".join(said) + f" ({self.origin})"

    def table(self, most: int) -> np.ndarray:
        """float64[2, most]: shares of the fabric's ports and of the links', with 1 … most sends."""
        return np.stack([shares(points, np.arange(1, most + 1)) for points in (self.fabric, self.links)])


def shares(points: tuple[Point, ...], sends: np.ndarray) -> np.ndarray:
    """float64[...]: the share that points (see `Efficiency`) tell for so many sends (integers[...])."""
    at, share = np.array(points).T
    return 1 / np.interp(sends, at, 1 / share)


def lost(contention: float, most: int) -> tuple[Point, ...]:
    """The points of a port at which every further send makes a byte take `contention` (0.1: ten per cent) longer, up to `most`
    sends: a share of 1 / (1 + contention (sends - 1))."""
    return ALL if most < 2 else (*ALL, (most, 1 / (1 + contention * (most - 1))))


def _said(points: tuple[Point, ...]) -> str:
    (first, alone), (last, crowded) = points[0], points[-1]
    if alone == crowded:
        return "their full rate" if alone == 1 else f"{share(alone)} of their rate"
    return f"{share(alone)} of their rate with {first} send{'s' if first > 1 else ''}, {share(crowded)} with {last}"
