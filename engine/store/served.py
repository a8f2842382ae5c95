"""Kept plans in whole serving steps, apart from other kept results: a process that only stores loads no simulation."""

from dataclasses import dataclass
from typing import Any, Self

from engine.serving.figures import ServingFigures
from engine.simulate.serving import ServedStep
from engine.store import is_worth_keeping, load_figures, load_timeline, save_figures, save_timeline
from engine.workload import digest_of


@dataclass(frozen=True)
class _Served:
    """The figures of a serving step, as they are kept with its timeline."""

    figures: ServingFigures

    def to_dict(self) -> dict[str, Any]:
        return self.figures.fields()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return cls(ServingFigures.from_fields(data))


def save_step(served: ServedStep, *depends_on: str) -> None:
    """Keep a plan in a serving step, if it is worth it, under a digest of all that it depends on."""
    if is_worth_keeping(served.timeline):
        save_timeline(digest_of("served", *depends_on), served.timeline)
        save_figures(_Served(served.figures), *depends_on)


def load_step(*depends_on: str) -> ServedStep | None:
    """The plan in a serving step that was kept, which counts as used now; None if there is none that can be read."""
    figures, timeline = load_figures(_Served, *depends_on), load_timeline(digest_of("served", *depends_on))
    return None if figures is None or timeline is None else ServedStep(figures.figures, timeline)
