"""Which GPUs and layers of a timeline are drawn, where there are more than a browser can show and a person can read."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from app.charts.gantt import MOST_BARS, layers_that_fit
from engine.timeline import Timeline

MOST_SENDERS = 16
"""GPUs that are drawn send by send."""


def drawable(shown: dict[str, Timeline], first: int, last: int, most: int) -> tuple[int, int]:
    """As many of these MoE layers, from the first one, as can be drawn as bars with `most` GPUs."""
    part = [fewer_lanes(timeline, first, last, most)[0] for timeline in shown.values()]
    return first, min(last, first + layers_that_fit(part) - 1)


def fewer_lanes(timeline: Timeline, first: int, last: int, most: int) -> tuple[Timeline, int]:
    """A timeline of more than `most` GPUs with the events of those alone that the others wait for in these layers, and then
    of those that are busy longest; these come first among its resources. And how many they are."""
    gpus = len(timeline.resources)
    if gpus <= most:
        return timeline, gpus
    part = timeline.layers(first, last).events
    waited_for = part.loc[part.groupby(["model", "layer", "kind"], observed=True)["end"].idxmax(), "resource"]
    busy = (part["end"] - part["start"]).groupby(part["resource"]).sum().reindex(range(gpus), fill_value=0.0)
    ranked = busy.sort_values(ascending=False, kind="stable").index
    order = list(dict.fromkeys([*sorted(waited_for.unique()), *ranked]))
    return only(timeline, sorted(order[: max(most, waited_for.nunique())]))


def only(timeline: Timeline, chosen: Sequence[int]) -> tuple[Timeline, int]:
    """A timeline with what these GPUs compute and send alone; they come first among its resources. And how many they are."""
    gpus, events = len(timeline.resources), timeline.events
    order = list(dict.fromkeys([*chosen, *range(gpus)]))
    place = np.empty(gpus, dtype=np.int64)
    place[order] = np.arange(gpus)
    drawn = events[events["resource"].isin(chosen)]
    peer = drawn["peer"].to_numpy()
    moved = drawn.assign(resource=place[drawn["resource"].to_numpy()], peer=np.where(peer < 0, peer, place[peer]))
    return replace(timeline, events=moved, resources=tuple(timeline.resources[gpu] for gpu in order)), len(chosen)


def gpus_with_sends(gpus: int, models: int) -> int:
    """How many of so many GPUs can be drawn with every send of one layer: each sends to all others twice a model, and
    computes three times."""
    return max(1, MOST_BARS // (models * (2 * (gpus - 1) + 3)))
