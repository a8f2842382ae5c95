"""Timelines as Gantt charts: lanes grouped by GPU, network above compute, several plans on one time axis."""

import math
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from app.charts.theme import KIND_TITLES, NEUTRAL, SMALLEST, bar, finish, ink, legend_above, plain, range_bar
from engine.simulate.waits import last_of_steps
from engine.timeline import KINDS, Timeline
from engine.units import TIME, scale_of, seconds, size

MOST_BARS = 5000
"""Events drawn as bars; a browser gets slow above, so longer stretches must be chosen by layer."""
SECOND = ", second model"
HEIGHT = 640
"""Pixels of a chart with many lanes: all of it, its time axis too, is in sight on a laptop."""
LANE, LABEL = 26, 15
"""Pixels of a lane where there are few, and of a lane's name."""
ABOVE, BELOW, TITLE = 84, 88, 30
"""Pixels above the first plan's lanes, below the last one's (times and range bar), and of a plan's name."""

Drawn = dict[str, Any]
"""A part of a figure as plotly's JSON has it."""


def layers_that_fit(timelines: list[Timeline]) -> int:
    """How many layers, from the first, can be drawn as bars for all timelines together."""
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
) -> go.Figure:
    """The timelines by name, one above the other, from layer `first` to layer `last` (both included), never higher than HEIGHT,
    with a range bar below to zoom.

    Simulated bars are outlined, measured ones not. bounds: seconds from a timeline's own start of the chosen layers,
    drawn as a dashed line with its value; lanes: how many of the GPUs, from the first, are drawn (None: all);
    second: what names of hatched bars end with; dark: of the page.
    """
    parts = {name: _stretch(timeline, first, last) for name, timeline in timelines.items()}
    longest = max((events["end"].max() for events in parts.values() if len(events)), default=0.0)
    factor, unit = scale_of(longest, TIME)
    lanes = lanes or max(len(timeline.resources) for timeline in timelines.values())
    # Two models have twice as many kinds, whose legend takes a second row.
    above = ABOVE + 26 * any((events["model"] > 0).any() for events in parts.values())
    plot = min(HEIGHT - above - BELOW, (LANE * lanes + TITLE) * len(parts))
    lane = (plot - TITLE * (len(parts) - 1)) / len(parts) / lanes
    # Plain dictionaries, which a figure takes all at once: added one by one they take plotly three times as long.
    traces: list[Drawn] = []
    layout: Drawn = {"shapes": [], "annotations": []}
    named: set[str] = set()
    for row, (name, events) in enumerate(parts.items(), start=1):
        x, y = _axes(row)
        bars = _bars(events, timelines[name], factor, named, second)
        path = _path(events, factor, ink(dark)) | {"showlegend": row == 1}
        traces += [trace | {"xaxis": x, "yaxis": y} for trace in (*bars, path)]
        top = 1 - (row - 1) * (lane * lanes + TITLE) / plot
        length = f" · {_length(events['end'].max(), timelines[name].total)}" if len(events) else ""
        layout["annotations"].append(_above_lanes(plain(name) + length, top))
        if bounds and name in bounds:
            layout["shapes"].append(_bound(bounds[name] / factor, x, y))
            layout["annotations"].append(_bound_in_words(bounds[name], x, y))
        lane_axis = _lane_axis(timelines[name].resources[:lanes], math.ceil(LABEL / lane))
        layout[f"yaxis{row}"] = lane_axis | {"anchor": x, "domain": [max(top - lane * lanes / plot, 0), top]}
        layout[f"xaxis{row}"] = _time_axis(longest / factor, unit, plot, _axes(len(parts))[0], x) | {"anchor": y}
    height = int(above + plot + BELOW)
    layout |= {"barmode": "overlay", "bargap": 0.1, "legend": legend_above(height)}
    return finish(go.Figure(traces, layout), title, height, top=above)


def _axes(row: int) -> tuple[str, str]:
    """plotly's names of the axes of a plan's row, from 1."""
    return (f"x{row}", f"y{row}") if row > 1 else ("x", "y")


def _length(shown: float, whole: float) -> str:
    """`359 µs of 1.44 ms` of a stretch, `1.44 ms` of a whole timeline."""
    return seconds(whole) if seconds(shown) == seconds(whole) else f"{seconds(shown)} of {seconds(whole)}"


def _stretch(timeline: Timeline, first: int, last: int) -> pd.DataFrame:
    events = timeline.events
    events = events[(events["layer"] >= first) & (events["layer"] <= last)]
    origin = events["start"].min() if len(events) else 0.0
    return events.assign(start=events["start"] - origin, end=events["end"] - origin)


def _bars(events: pd.DataFrame, timeline: Timeline, factor: float, named: set[str], second: str) -> list[Drawn]:
    """A trace a kind and model. named: those that the legend has, to which these are added."""
    short = [name.split(" · ")[0] for name in timeline.resources]
    traces = []
    for model, kind in product(range(2), KINDS):
        events_of_kind = events[(events["kind"] == kind) & (events["model"] == model)]
        if not len(events_of_kind):
            continue
        name = KIND_TITLES[kind] + second * model
        traces.append(
            {
                "type": "bar",
                "x": (events_of_kind["end"] - events_of_kind["start"]).to_numpy() / factor,
                "base": events_of_kind["start"].to_numpy() / factor,
                "y": events_of_kind["resource"].to_numpy() + _lane_shift(events_of_kind),
                "width": 0.36,
                "orientation": "h",
                "marker": bar(kind, timeline.source == "simulated", hatched=model > 0),
                "name": name,
                "legendgroup": name,
                "showlegend": name not in named,
                "customdata": _hover(events_of_kind, short, second),
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
        named.add(name)
    return traces


def _path(events: pd.DataFrame, factor: float, colour: str) -> Drawn:
    """Thin, in the page's ink, which no bar has."""
    path = _critical_path(events)
    return {
        "type": "scatter",
        "x": path["time"].to_numpy() / factor,
        "y": path["lane"].to_numpy(),
        "mode": "lines",
        "line": {"color": colour, "width": 1.25},
        "name": "Critical path",
        "legendgroup": "critical",
        "hoverinfo": "skip",
    }


def _above_lanes(text: str, top: float) -> Drawn:
    return {
        "text": text,
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": top,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 13},
    }


def _bound(time: float, x: str, y: str) -> Drawn:
    return {
        "type": "line",
        "x0": time,
        "x1": time,
        "xref": x,
        "y0": 0,
        "y1": 1,
        "yref": f"{y} domain",
        "line": {"dash": "dash", "width": 1.5, "color": NEUTRAL},
    }


def _bound_in_words(bound: float, x: str, y: str) -> Drawn:
    """At the end of the plan's own row: beside the line it would lie over a long name. bound: seconds."""
    return {
        "text": f"bound {seconds(bound)}, dashed",
        "x": 1,
        "xref": f"{x} domain",
        "xanchor": "right",
        "y": 1,
        "yref": f"{y} domain",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": SMALLEST},
    }


def _time_axis(longest: float, unit: str, plot: float, last: str, own: str) -> Drawn:
    """One time axis for all plans, with a range bar below the last one and a line through all of them at the pointer's time,
    which shows what else happens then. longest: in `unit`; plot: pixels of all lanes; last, own: axes of the last plan and
    of this one."""
    span = [0, longest * 1.02 or 1]
    axis: Drawn = {
        "range": span,
        "domain": [0, 1],
        "showspikes": True,
        "spikemode": "across",
        "spikesnap": "cursor",
        "spikethickness": 1,
        "spikecolor": NEUTRAL,
        "spikedash": "dot",
    }
    if own != last:
        return axis | {"matches": last, "showticklabels": False}
    # A name of the axis below the range bar would be cut off: plotly leaves too little room for it.
    return axis | {"ticksuffix": f" {unit}", "rangeslider": range_bar(span, plot)}


def _lane_axis(names: tuple[str, ...], every: int) -> Drawn:
    """Only every so-many-th name where there is no room for all; a bar's tip tells its lane."""
    return {
        "tickvals": list(range(0, len(names), every)),
        "ticktext": [plain(name) for name in names[::every]],
        "tickfont": {"size": SMALLEST},
        "range": [len(names) - 0.45, -0.55],
        "showgrid": False,
        "zeroline": False,
    }


def _critical_path(events: pd.DataFrame) -> pd.DataFrame:
    """Columns time, lane: in every step along the GPU that all others wait for."""
    last = last_of_steps(events)
    time = np.column_stack([last["end"] - last["seconds"], last["end"]])
    lane = last["resource"] + _lane_shift(last)
    return pd.DataFrame({"time": time.ravel(), "lane": np.repeat(lane.to_numpy(), 2)})


def _lane_shift(events: pd.DataFrame) -> np.ndarray:
    """The network lane lies in the upper half of a GPU's row, computation in the lower half."""
    return np.where(events["stream"] == "network", -0.2, 0.2)


def _hover(events: pd.DataFrame, names: list[str], second: str) -> list[str]:
    texts = []
    for event in events.itertuples():
        length = seconds(event.end - event.start)
        where = names[event.resource]
        if event.peer >= 0:
            where = f"{where} → {names[event.peer]} · {size(event.bytes)}"
        elif event.bytes:
            where = f"{where} sends {size(event.bytes)}"
        texts.append(
            f"{KIND_TITLES[event.kind]}{second * event.model}, layer {event.layer}<br>{where}<br>{length}, "
            f"from {seconds(event.start)}"
        )
    return texts
