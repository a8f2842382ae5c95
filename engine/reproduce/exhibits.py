"""Exhibits, the figures and tables of a paper as our engine computes them, and claims: its printed numbers and ours."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeVar

from pydantic import Field

from engine.errors import StoppedError
from engine.problem import Problem
from engine.result import Stop
from engine.schema import Frozen
from engine.units import digits

Item = TypeVar("Item")
Value = float | tuple[float, float]
"""A number, or the lowest and the highest of several."""
PART_OF_EFFECT, PART_OF_QUANTITY = 0.25, 0.1
"""The distance at which ours counts as the published number where the paper gives no spread: as a part of its effect (a
speedup less 1), and as a part of a plain quantity."""


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT = "not"


class Claim(Frozen):
    """A number of a paper, and ours.

    quantity: in words, with its unit: "speedup over SJF, heterogeneous"
    published, ours: a number, or the lowest and highest of several; None: cannot be computed here, and `why` says why
    neutral: the value of no effect: 1 of a speedup, 0 of a share that is saved; None for a plain quantity, such as seconds
    spread: the paper's own, on either side; None: `PART_OF_EFFECT`, or of a plain quantity `PART_OF_QUANTITY`
    why: why they differ, or how ours was found; one line
    """

    quantity: str
    published: Value
    ours: Value | None = None
    neutral: float | None = None
    spread: float | None = Field(default=None, ge=0)
    why: str

    @property
    def verdict(self) -> Verdict:
        """Reproduced: within the paper's range and spread on both ends. Partly: an effect in the same direction, half to twice
        as large; of a plain quantity, half to twice as much."""
        if self.ours is None:
            return Verdict.NOT
        zero, part = (0.0, PART_OF_QUANTITY) if self.neutral is None else (self.neutral, PART_OF_EFFECT)
        (low, high), (least, most) = ([end - zero for end in _ends(value)] for value in (self.published, self.ours))
        around = [part * abs(end) if self.spread is None else self.spread for end in (low, high)]
        if low - around[0] <= least and most <= high + around[1]:
            return Verdict.REPRODUCED
        return Verdict.PARTLY if low + high and 0.5 <= (least + most) / (low + high) <= 2 else Verdict.NOT


class Chart(Frozen):
    """A chart of an exhibit's rows, of the paper's kind.

    x, y, series: columns; one bar, point or line for every value of `series`
    facet: a column with a panel for every value
    published: column with the paper's own values of `y`, drawn as hollow marks; None where it prints none
    y_title: with the unit
    """

    kind: Literal["bars", "lines", "points", "steps"]
    x: str
    y: str
    series: str | None = None
    facet: str | None = None
    published: str | None = None
    x_title: str
    y_title: str
    log_x: bool = False


class Exhibit(Frozen):
    """A figure or table of a paper, computed.

    rows: its points or cells, plain numbers and words by column; times in seconds
    note: for all of it: what stands in for inputs that are not public
    """

    claims: tuple[Claim, ...]
    rows: tuple[Mapping[str, str | int | float | None], ...] = ()
    chart: Chart | None = None
    note: str = ""


@dataclass(frozen=True)
class Opening:
    """A setting of an exhibit that can be opened and planned: its problem, and the system that plans it.

    title: of the setting, as a person reads it
    """

    title: str
    problem: Callable[[], Problem]
    system: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A figure or table that can be computed.

    number: as the paper has it: "Figure 13", "Table VI"
    section: of the paper, where its text describes it
    title: in our words
    make: computes it; when the stop is True it raises StoppedError or ends early with a part, which nobody is shown
    """

    number: str
    section: str
    title: str
    make: Callable[[Stop], Exhibit]
    openings: tuple[Opening, ...] = ()


def go_on(stop: Stop) -> None:
    """Raise StoppedError once the stop is True: a figure is there as a whole or not at all."""
    if stop():
        raise StoppedError("stopped before the figure was whole")


def each(items: Iterable[Item], stop: Stop) -> Iterator[Item]:
    """The items one after another until the stop, which raises StoppedError: each is work of less than a second."""
    for item in items:
        go_on(stop)
        yield item


def in_words(value: Value | None, missing: str = "–") -> str:
    """`1.36 to 1.81`, or `missing` for None."""
    if value is None:
        return missing
    return " to ".join(digits(end) for end in value) if isinstance(value, tuple) else digits(value)


def _ends(value: Value) -> tuple[float, float]:
    return (min(value), max(value)) if isinstance(value, tuple) else (value, value)
