"""Timelines as Gantt charts: lanes grouped by GPU, network above compute, several plans on one time axis."""

import math
from itertools import product

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

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
    figure = make_subplots(
        len(parts),
        1,
        shared_xaxes=True,
        vertical_spacing=TITLE / plot,
        subplot_titles=[
            f"{plain(name)} · {_length(parts[name]['end'].max(), timelines[name].total)}"
            if len(parts[name])
            else plain(name)
            for name in parts
        ],
    )
    seen: set[str] = set()
    for row, (name, events) in enumerate(parts.items(), start=1):
        _draw(figure, row, events, timelines[name], factor, seen, second)
        _draw_path(figure, row, events, factor, ink(dark))
        _name_lanes(figure, row, timelines[name].resources[:lanes], math.ceil(LABEL / lane))
        if bounds and name in bounds:
            _draw_bound(figure, row, bounds[name], factor)
    _share_time_axis(figure, len(parts), longest / factor, unit, plot)
    for annotation in figure.layout.annotations[: len(parts)]:
        annotation.update(x=0, xanchor="left", font_size=13)
    height = int(above + plot + BELOW)
    return finish(figure, title, height, barmode="overlay", bargap=0.1, top=above, legend=legend_above(height))


def _length(shown: float, whole: float) -> str:
    """`359 µs of 1.44 ms` of a stretch, `1.44 ms` of a whole timeline."""
    return seconds(whole) if seconds(shown) == seconds(whole) else f"{seconds(shown)} of {seconds(whole)}"


def _stretch(timeline: Timeline, first: int, last: int) -> pd.DataFrame:
    events = timeline.events
    events = events[(events["layer"] >= first) & (events["layer"] <= last)]
    origin = events["start"].min() if len(events) else 0.0
    return events.assign(start=events["start"] - origin, end=events["end"] - origin)


def _draw(
    figure: go.Figure, row: int, events: pd.DataFrame, timeline: Timeline, factor: float, seen: set[str], second: str
) -> None:
    short = [name.split(" · ")[0] for name in timeline.resources]
    for model, kind in product(range(2), KINDS):
        events_of_kind = events[(events["kind"] == kind) & (events["model"] == model)]
        if not len(events_of_kind):
            continue
        name = KIND_TITLES[kind] + second * model
        figure.add_bar(
            x=(events_of_kind["end"] - events_of_kind["start"]) / factor,
            base=events_of_kind["start"] / factor,
            y=events_of_kind["resource"] + _lane_shift(events_of_kind),
            width=0.36,
            orientation="h",
            marker=bar(kind, timeline.source == "simulated", hatched=model > 0),
            name=name,
            legendgroup=name,
            showlegend=name not in seen,
            customdata=_hover(events_of_kind, short, second),
            hovertemplate="%{customdata}<extra></extra>",
            row=row,
            col=1,
        )
        seen.add(name)


def _draw_path(figure: go.Figure, row: int, events: pd.DataFrame, factor: float, colour: str) -> None:
    """Thin, in the page's ink, which no bar has."""
    path = _critical_path(events)
    figure.add_scatter(
        x=path["time"] / factor,
        y=path["lane"],
        mode="lines",
        line={"color": colour, "width": 1.25},
        name="Critical path",
        legendgroup="critical",
        showlegend=row == 1,
        hoverinfo="skip",
        row=row,
        col=1,
    )


def _draw_bound(figure: go.Figure, row: int, bound: float, factor: float) -> None:
    figure.add_vline(x=bound / factor, line={"dash": "dash", "width": 1.5, "color": NEUTRAL}, row=row, col=1)
    # At the end of the plan's own row: beside the line it would lie over a long name.
    figure.add_annotation(
        text=f"bound {seconds(bound)}, dashed",
        x=1,
        xref="x domain",
        xanchor="right",
        y=1,
        yref="y domain",
        yanchor="bottom",
        showarrow=False,
        font={"size": SMALLEST},
        row=row,
        col=1,
    )


def _share_time_axis(figure: go.Figure, rows: int, longest: float, unit: str, plot: float) -> None:
    """One time axis for all plans, with a range bar below the last one and a line through all of them at the pointer's time,
    which shows what else happens then. longest: in `unit`; plot: pixels of all lanes."""
    span = [0, longest * 1.02 or 1]
    figure.update_xaxes(
        range=span,
        showspikes=True,
        spikemode="across",
        spikesnap="cursor",
        spikethickness=1,
        spikecolor=NEUTRAL,
        spikedash="dot",
    )
    # A name of the axis below the range bar would be cut off: plotly leaves too little room for it.
    figure.update_xaxes(ticksuffix=f" {unit}", rangeslider=range_bar(span, plot), row=rows)


def _name_lanes(figure: go.Figure, row: int, names: tuple[str, ...], every: int) -> None:
    """Only every so-many-th where there is no room for all; a bar's tip tells its lane."""
    figure.update_yaxes(
        tickvals=list(range(0, len(names), every)),
        ticktext=[plain(name) for name in names[::every]],
        tickfont={"size": SMALLEST},
        range=[len(names) - 0.45, -0.55],
        showgrid=False,
        zeroline=False,
        row=row,
        col=1,
    )


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
