"""Which GPUs and layers of a timeline are drawn, where there are more than a browser can show and a person can read."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from app.charts.gantt import MOST_BARS, layers_that_fit
from engine.cluster import Cluster
from engine.simulate.waits import last_of_steps
from engine.timeline import Timeline

MOST_LANES = 16
"""Lanes of a plan that a person can read; more GPUs are folded into lanes of nodes or types."""
NODES, TYPES = "Nodes", "GPU types"
MOST_SENDERS = 16
"""GPUs that are drawn send by send."""


def drawable(shown: dict[str, Timeline], first: int, last: int, most: int) -> tuple[int, int]:
    """As many of these MoE layers, from the first one, as can be drawn as bars with `most` GPUs."""
    part, _ = fewer_lanes(shown, first, last, most)
    return first, min(last, first + layers_that_fit(list(part.values())) - 1)


def fewer_lanes(shown: dict[str, Timeline], first: int, last: int, most: int) -> tuple[dict[str, Timeline], int]:
    """Timelines of the same more than `most` GPUs with the events of the same few alone, so that they can be compared lane by
    lane: those that the others wait for in these layers, under any plan, and then those that the first plan keeps busy
    longest. They come first among the resources. And how many they are."""
    gpus = len(next(iter(shown.values())).resources)
    if gpus <= most:
        return shown, gpus
    parts = [timeline.layers(first, last).events for timeline in shown.values()]
    waited_for = sorted({int(gpu) for part in parts for gpu in last_of_steps(part)["resource"]})
    seconds = parts[0]["end"] - parts[0]["start"]
    busy = seconds.groupby(parts[0]["resource"]).sum().reindex(range(gpus), fill_value=0.0)
    ranked = busy.sort_values(ascending=False, kind="stable").index
    chosen = sorted(list(dict.fromkeys([*waited_for, *ranked]))[: max(most, len(waited_for))])
    return {name: only(timeline, chosen)[0] for name, timeline in shown.items()}, len(chosen)


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


def fold(timeline: Timeline, group_of_gpu: np.ndarray, names: Sequence[str]) -> Timeline:
    """A timeline with a lane for every group of GPUs: a bar from when the first of its GPUs begins with a kind
    of work in a layer until the last one ends, with what they send together.

    group_of_gpu: int64[gpu]; names: of the groups
    """
    events = timeline.events.assign(resource=group_of_gpu[timeline.events["resource"].to_numpy()], peer=-1)
    columns = ["resource", "stream", "model", "layer", "kind"]
    folded = events.groupby(columns, observed=True, sort=False, as_index=False).agg(
        start=("start", "min"), end=("end", "max"), peer=("peer", "first"), bytes=("bytes", "sum")
    )
    return replace(timeline, events=folded[list(timeline.events.columns)], resources=tuple(names), labels=None)


def folds(cluster: Cluster) -> dict[str, tuple[np.ndarray, tuple[str, ...]]]:
    """What the GPUs of a cluster can be folded by, the most telling first: int64[gpu] of their groups, and their names."""
    nodes, types = cluster.nodes, list(dict.fromkeys(gpu.type for gpu in cluster.gpus))
    by_node = cluster.node_of_gpu, tuple(f"{node.name} · {len(node.gpus)} GPUs" for node in nodes)
    type_of_gpu = np.array([types.index(gpu.type) for gpu in cluster.gpus])
    by_type = (
        type_of_gpu,
        tuple(f"{name} × {count}" for name, count in zip(types, np.bincount(type_of_gpu), strict=True)),
    )
    found = {NODES: by_node, TYPES: by_type} if len(nodes) > 1 else {TYPES: by_type}
    many = len(nodes) > MOST_LANES and len(types) > 1
    return dict(sorted(found.items(), key=lambda item: (item[0] == NODES) == many))


def gpus_with_sends(gpus: int, models: int) -> int:
    """How many of so many GPUs can be drawn with every send of one layer: each sends to all others twice a model, and
    computes three times."""
    return max(1, MOST_BARS // (models * (2 * (gpus - 1) + 3)))
