"""Timelines as Gantt charts: lanes grouped by GPU, network above compute, several plans on one time axis.

Also the choice of GPUs and layers that a browser can draw, and the GPUs and layers that the others wait for.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from app.charts import theme
from engine.cluster import Cluster
from engine.simulate.events import last_of_steps
from engine.timeline import HOST_KINDS, Timeline
from engine.units import TIME, scale_of, seconds, share, size

MOST_BARS = 5000
"""Events drawn as bars; a browser gets slow above, so longer stretches must be chosen by layer."""
SECOND, CRITICAL = ", second model", "Critical path"
HEIGHT = 640
"""Pixels of a chart with many lanes: its time axis stays in sight on a laptop."""
LANE, LABEL = 26, 15
"""Pixels of a lane if there are few, and of a lane's name."""
ABOVE, BELOW, TITLE = 54, 88, 30
"""Pixels above the first plan's lanes besides the legend, below the last one's (times and range bar), and of a plan's name."""
LONGEST = 60
"""Most characters of a plan's name above its lanes: times and bound stand on the same line."""

Drawn = dict[str, Any]
"""A part of a figure as plotly's JSON has it."""


def layers_that_fit(timelines: list[Timeline]) -> int:
    """Return the number of layers, from the first, that can be drawn as bars for all timelines together."""
    per_layer = sum(len(timeline.events) / max(timeline.events["layer"].nunique(), 1) for timeline in timelines)
    return max(1, int(MOST_BARS / max(per_layer, 1)))


def gantt(
    timelines: dict[str, Timeline],
    first: int,
    last: int,
    title: str,
    bounds: dict[str, float] | None = None,
    lanes: int | None = None,
    second: str = SECOND,
    dark: bool = False,
    view: tuple[float, float] | None = None,
) -> go.Figure:
    """The timelines by name, one above the other, from layer `first` to layer `last` (both included), with a range bar below.

    Simulated bars are outlined, measured ones not. The chart is never higher than HEIGHT.
    bounds: seconds from a timeline's own start of the chosen layers, drawn as a dashed line with its value
    lanes: number of GPUs drawn, from the first; None: all
    second: suffix of the names of hatched bars
    dark: the page's theme
    view: seconds from the begin of the chosen layers that are in sight; None: all
    """
    parts = {name: _stretch(timeline, first, last) for name, timeline in timelines.items()}
    longest = max((events["end"].max() for events in parts.values() if len(events)), default=0.0)
    factor, unit = scale_of(longest, TIME)
    lanes = lanes or max(len(timeline.resources) for timeline in timelines.values())
    entries = {theme.KIND_TITLES[kind] + second * model for part in parts.values() for kind, model in _kinds(part)}
    above = ABOVE + theme.LINE * theme.legend_lines([*entries, CRITICAL])
    plot = min(HEIGHT - above - BELOW, (LANE * lanes + TITLE) * len(parts))
    lane = (plot - TITLE * (len(parts) - 1)) / len(parts) / lanes
    # Plain dictionaries, which a figure takes all at once: added one by one they take plotly three times as long.
    traces: list[Drawn] = []
    layout: Drawn = {"shapes": [], "annotations": []}
    named: set[str] = set()
    for row, (name, events) in enumerate(parts.items(), start=1):
        x, y = _axes(row)
        bars = _bars(events, timelines[name], factor, named, second)
        path = _path(events, factor, theme.ink(dark)) | {"showlegend": row == 1}
        traces += [trace | {"xaxis": x, "yaxis": y} for trace in (*bars, path)]
        top = 1 - (row - 1) * (lane * lanes + TITLE) / plot
        shown, whole = seconds(events["end"].max()) if len(events) else "", seconds(timelines[name].total)
        length = shown and f" · {whole if shown == whole else f'{shown} of {whole}'}"
        left = {"x": 0, "xref": "paper", "xanchor": "left", "y": top, "yref": "paper", "yanchor": "bottom"}
        layout["annotations"].append(
            {"text": theme.plain(theme.shortened(name, LONGEST)) + length, "showarrow": False, "font": {"size": 13}} | left
        )
        if bounds and name in bounds:
            line, at = {"dash": "dash", "width": 1.5, "color": theme.NEUTRAL}, bounds[name] / factor
            ends = {"x0": at, "x1": at, "xref": x, "y0": 0, "y1": 1, "yref": f"{y} domain"}
            layout["shapes"].append({"type": "line", "line": line} | ends)
            # In words at the end of the plan's own row: at the line it would lie over a long name.
            said = {"text": f"bound {seconds(bounds[name])}, dashed", "showarrow": False, "font": {"size": theme.SMALLEST}}
            end = {"x": 1, "xref": f"{x} domain", "xanchor": "right", "y": 1, "yref": f"{y} domain", "yanchor": "bottom"}
            layout["annotations"].append(said | end)
        lane_axis = _lane_axis(timelines[name].resources[:lanes], math.ceil(LABEL / lane))
        layout[f"yaxis{row}"] = lane_axis | {"anchor": x, "domain": [max(top - lane * lanes / plot, 0), top]}
        layout[f"xaxis{row}"] = _time_axis(longest / factor, unit, plot, _axes(len(parts))[0], x) | {"anchor": y}
        if view is not None:
            layout[f"xaxis{row}"]["range"] = [view[0] / factor, view[1] / factor]
    height = int(above + plot + BELOW)
    layout |= {"barmode": "overlay", "bargap": 0.1, "legend": theme.legend_above(height)}
    return theme.finish(go.Figure(traces, layout), title, height, top=above)


def _kinds(events: pd.DataFrame) -> set[tuple[str, int]]:
    return set(events[["kind", "model"]].drop_duplicates().itertuples(index=False, name=None))


def longest_steps(timeline: Timeline, first: int, last: int) -> list[tuple[float, float]]:
    """Begin and end of every step of the critical path, in seconds from the begin of layer `first`, the longest one first."""
    steps = last_of_steps(_stretch(timeline, first, last)).sort_values("seconds", ascending=False, kind="stable")
    return [(end - length, end) for end, length in zip(steps["end"].tolist(), steps["seconds"].tolist(), strict=True)]


def _axes(row: int) -> tuple[str, str]:
    """plotly's names of the axes of a plan's row, from 1."""
    return (f"x{row}", f"y{row}") if row > 1 else ("x", "y")


def _stretch(timeline: Timeline, first: int, last: int) -> pd.DataFrame:
    events = timeline.events
    events = events[(events["layer"] >= first) & (events["layer"] <= last)]
    origin = events["start"].min() if len(events) else 0.0
    return events.assign(start=events["start"] - origin, end=events["end"] - origin)


def _bars(events: pd.DataFrame, timeline: Timeline, factor: float, named: set[str], second: str) -> list[Drawn]:
    """A trace for each kind and model. named: entries that the legend has, to which these are added."""
    short = [name.split(" · ")[0] for name in timeline.resources]
    traces = []
    places = events.groupby(["model", "kind"], observed=True).indices
    for model, kind in product(range(2), theme.KIND_TITLES):
        if (model, kind) not in places:
            continue
        events_of_kind = events.iloc[places[model, kind]]
        name = theme.KIND_TITLES[kind] + second * model
        trace = {
            "type": "bar",
            "x": (events_of_kind["end"] - events_of_kind["start"]).to_numpy() / factor,
            "base": events_of_kind["start"].to_numpy() / factor,
            "y": events_of_kind["resource"].to_numpy() + _lane_shift(events_of_kind),
            "width": 0.14 if kind in HOST_KINDS else 0.36,
            "orientation": "h",
            "marker": theme.bar(kind, timeline.source == "simulated", hatched=model > 0),
            "name": name,
            "legendgroup": name,
            "legendrank": theme.rank(kind),
            "showlegend": name not in named,
            "customdata": _hover(events_of_kind, short, second),
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        traces.append(trace)
        named.add(name)
    return traces


def _path(events: pd.DataFrame, factor: float, colour: str) -> Drawn:
    """Draw a thin line in the page's ink, a colour of no bar."""
    last = last_of_steps(events)
    time = np.column_stack([last["end"] - last["seconds"], last["end"]])
    lane = last["resource"] + _lane_shift(last)
    path = pd.DataFrame({"time": time.ravel(), "lane": np.repeat(lane.to_numpy(), 2)})
    return {
        "type": "scatter",
        "x": path["time"].to_numpy() / factor,
        "y": path["lane"].to_numpy(),
        "mode": "lines",
        "line": {"color": colour, "width": 1.25},
        "name": CRITICAL,
        "legendgroup": "critical",
        "hoverinfo": "skip",
    }


def _time_axis(longest: float, unit: str, plot: float, last: str, own: str) -> Drawn:
    """One time axis for all plans, with a range bar below the last one and a line through all of them at the pointer's time.

    longest: in `unit`
    plot: pixels of all lanes
    last, own: axes of the last plan and of this one
    """
    span = [0, longest * 1.02 or 1]
    axis: Drawn = {
        "range": span,
        "domain": [0, 1],
        "showspikes": True,
        "spikemode": "across",
        "spikesnap": "cursor",
        "spikethickness": 1,
        "spikecolor": theme.NEUTRAL,
        "spikedash": "dot",
    }
    if own != last:
        return axis | {"matches": last, "showticklabels": False}
    # A name of the axis below the range bar would be cut off: plotly leaves too little room for it.
    return axis | {"ticksuffix": f" {unit}", "rangeslider": theme.range_bar(span, plot)}


def _lane_axis(names: tuple[str, ...], every: int) -> Drawn:
    """Name only every few lanes if there is no room for all; a bar's tip tells its lane."""
    return {
        "tickvals": list(range(0, len(names), every)),
        "ticktext": [theme.plain(name) for name in names[::every]],
        "tickfont": {"size": theme.SMALLEST},
        "range": [len(names) - 0.45, -0.55],
        "showgrid": False,
        "zeroline": False,
    }


def _lane_shift(events: pd.DataFrame) -> np.ndarray:
    """The network lane lies in the upper half of a GPU's row, computation in the lower half, its host's work between them."""
    return np.select([events["stream"] == "network", events["stream"] == "host"], [-0.2, 0.0], 0.2)


def _hover(events: pd.DataFrame, names: list[str], second: str) -> list[str]:
    texts = []
    columns = ("kind", "model", "layer", "resource", "peer", "bytes", "start", "end")
    for kind, model, layer, gpu, peer, sent, start, end in zip(*map(events.get, columns), strict=True):
        where = names[gpu]
        if peer >= 0:
            where = f"{where} → {names[peer]} · {size(sent)}"
        elif sent:
            where = f"{where} sends {size(sent)}"
        texts.append(
            f"{theme.KIND_TITLES[kind]}{second * model}, layer {layer}<br>{where}<br>{seconds(end - start)}, "
            f"from {seconds(start)}"
        )
    return texts


MOST_LANES = 16
"""Lanes of a plan that a person can read; more GPUs are folded into lanes of nodes or types."""
NODES, TYPES = "Nodes", "GPU types"
MOST_SENDERS = 16
"""GPUs that are drawn send by send."""


def drawable(shown: dict[str, Timeline], first: int, last: int, most: int) -> tuple[int, int]:
    """Return the first and the last of these MoE layers that can be drawn as bars with `most` GPUs."""
    part, _ = fewer_lanes(shown, first, last, most)
    return first, min(last, first + layers_that_fit(list(part.values())) - 1)


def fewer_lanes(shown: dict[str, Timeline], first: int, last: int, most: int) -> tuple[dict[str, Timeline], int]:
    """Reduce timelines of the same GPUs to the same `most` of them, so that they can be compared lane by lane.

    Kept are GPUs that the others wait for in these layers, under any plan, then those that the first plan keeps busy longest.
    They come first among the resources. Also return their number.
    """
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
    """Reduce a timeline to the work and the sends of these GPUs, which come first among its resources; also return their
    number."""
    gpus, events = len(timeline.resources), timeline.events
    order = list(dict.fromkeys([*chosen, *range(gpus)]))
    place = np.empty(gpus, dtype=np.int64)
    place[order] = np.arange(gpus)
    drawn = events[events["resource"].isin(chosen)]
    peer = drawn["peer"].to_numpy()
    moved = drawn.assign(resource=place[drawn["resource"].to_numpy()], peer=np.where(peer < 0, peer, place[peer]))
    return replace(timeline, events=moved, resources=tuple(timeline.resources[gpu] for gpu in order)), len(chosen)


def fold(timeline: Timeline, group_of_gpu: np.ndarray, names: Sequence[str]) -> Timeline:
    """A timeline with a lane for every group of GPUs: a bar from the first start of a kind of work in a layer to its last end,
    with everything that the group sends together.

    group_of_gpu: int64[gpu]
    names: one a group
    """
    events = timeline.events.assign(resource=group_of_gpu[timeline.events["resource"].to_numpy()], peer=-1)
    columns = ["resource", "stream", "model", "layer", "kind"]
    folded = events.groupby(columns, observed=True, sort=False, as_index=False).agg(
        start=("start", "min"), end=("end", "max"), peer=("peer", "first"), bytes=("bytes", "sum")
    )
    return replace(timeline, events=folded[list(timeline.events.columns)], resources=tuple(names), labels=None)


def folds(cluster: Cluster) -> dict[str, tuple[np.ndarray, tuple[str, ...]]]:
    """Groupings of a cluster's GPUs by title, the most telling first: int64[gpu] of their groups, and the groups' names."""
    nodes, types = cluster.nodes, list(dict.fromkeys(gpu.type for gpu in cluster.gpus))
    by_node = cluster.node_of_gpu, tuple(f"{node.name} · {len(node.gpus)} GPUs" for node in nodes)
    type_of_gpu = np.array([types.index(gpu.type) for gpu in cluster.gpus])
    by_type = (type_of_gpu, tuple(f"{name} × {count}" for name, count in zip(types, np.bincount(type_of_gpu), strict=True)))
    found = {NODES: by_node, TYPES: by_type} if len(nodes) > 1 else {TYPES: by_type}
    many = len(nodes) > MOST_LANES and len(types) > 1
    return dict(sorted(found.items(), key=lambda item: (item[0] == NODES) == many))


def gpus_with_sends(gpus: int, models: int) -> int:
    """Return the most GPUs that can be drawn with every send of one layer: each sends to all others twice a model, and computes
    three times."""
    return max(1, MOST_BARS // (models * (2 * (gpus - 1) + 3)))


MOST = 24
"""GPUs and layers that are drawn: those that the others wait for longest."""
EVEN = 1.02
"""Times the mean: a slowest layer below it is no finding."""


def by_gpu(waits: pd.DataFrame, names: tuple[str, ...]) -> go.Figure:
    """Stacked bars of seconds by kind, one for each GPU that the others waited for; the chart by layer names the colours.

    waits: as `engine.simulate.events`
    names: one a GPU
    """
    times = waits.groupby("gpu")["seconds"].sum().sort_values(ascending=False)
    worst, whole = int(times.index[0]), times.sum() or 1.0
    title = f"{theme.plain(names[worst])} finishes last for {share(times.iloc[0] / whole)} of the time"
    if len(times) > MOST:
        title += f" (the {MOST} longest of {len(times)} GPUs that others wait for)"
    shown = {int(gpu): theme.plain(names[gpu]) for gpu in times.index[:MOST]}
    return _wait_bars(waits, "gpu", shown, worst, title, "", legend=False)


def by_layer(waits: pd.DataFrame) -> go.Figure:
    """The same by MoE layer, in their order."""
    times = waits.groupby("layer")["seconds"].sum()
    worst, mean = int(times.idxmax()), times.mean() or 1.0
    longest = times.sort_values(ascending=False).index[:MOST]
    above = times[worst] / mean
    title = f"Layer {worst} is slowest: {seconds(times[worst])}, {above:.2f}× mean"
    if above < EVEN:
        title = f"All layers take about as long: {seconds(mean)}"
    if len(times) > MOST:
        title += f" (the {MOST} slowest of {len(times)})"
    names = {int(layer): f"layer {layer}" for layer in sorted(longest)}
    return _wait_bars(waits, "layer", names, worst, title, "MoE layer")


def _wait_bars(
    waits: pd.DataFrame, by: str, names: dict[int, str], worst: int, title: str, axis: str, legend: bool = True
) -> go.Figure:
    shown = waits[waits[by].isin(names)]
    factor, unit = scale_of(float(shown.groupby(by)["seconds"].sum().max()), TIME)
    times = shown.groupby(["model", "kind", by], observed=True)["seconds"].sum().unstack(fill_value=0.0)[list(names)]
    traces = []
    for model, kind in product((0, 1), theme.KIND_TITLES):
        if (model, kind) not in times.index:
            continue
        name, own = theme.KIND_TITLES[kind] + SECOND * model, times.loc[model, kind].to_numpy()
        trace = {
            "type": "bar",
            "x": own / factor,
            "y": list(names.values()),
            "orientation": "h",
            "name": name,
            "marker": {
                "color": theme.KIND_COLOURS[kind],
                "pattern": {"shape": "/" if model else "", "size": 6, "solidity": 0.35},
            },
            "customdata": [seconds(time) for time in own],
            "hovertemplate": f"%{{y}}<br>{name}<br>%{{customdata}}<extra></extra>",
        }
        traces.append(trace)
    longest = {
        "x": shown.loc[shown[by] == worst, "seconds"].sum() / factor,
        "y": names[worst],
        "text": f'<span style="color: {theme.MARK}">◀</span> longest',
        "showarrow": False,
        "xanchor": "left",
        "font": {"size": theme.SMALLEST},
    }
    height = 24 * len(names) + 150
    layout = {
        "annotations": [longest],
        "xaxis": {"title": f"time others wait, {unit}", "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "title": axis},
        "barmode": "stack",
        "bargap": 0.25,
        "showlegend": None if legend else False,
    }
    return theme.finish(go.Figure(traces), title, height, top=72, legend=theme.legend_above(height), **layout)
