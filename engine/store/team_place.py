"""What a comment points to: a layer, the hops from it to the next one, a GPU, or a chart of the brief."""

import re
from dataclasses import dataclass
from typing import Literal, cast

from engine.errors import InputError

Kind = Literal["layer", "hops", "gpu", "chart"]
CHARTS = ("verdict", "timelines", "load")
_WRITTEN = re.compile(rf"(layer|hops|gpu):(0|[1-9]\d{{0,5}})|(chart):({'|'.join(CHARTS)})", re.ASCII)


@dataclass(frozen=True)
class Place:
    """number: of the MoE layer, or the GPU; chart: its name; written as `layer:3` or `chart:load`."""

    kind: Kind
    number: int = 0
    chart: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.chart or self.number}"


def place_of(text: str) -> Place:
    """The place that a comment or a link has. Raises InputError for what is none."""
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise InputError(f"{text[:40]!r} is no layer, GPU or chart that a comment can point to")
    kind, number, chart, name = match.groups()
    return Place("chart", chart=name) if chart else Place(cast(Kind, kind), int(number))
