"""Timelines as Gantt charts: lanes grouped by GPU, network above compute, several plans on one time axis."""

from itertools import product

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.charts.theme import KIND_COLOURS, KIND_TITLES, MARK, NEUTRAL, finish, legend_above, plain
from engine.simulate.waits import last_of_steps
from engine.timeline import KINDS, Timeline
from engine.units import TIME, scale_of, seconds, size

MOST_BARS = 5000
"""Events drawn as bars; a browser gets slow above, so longer stretches must be chosen by layer."""
SECOND = ", second model"


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
) -> go.Figure:
    """The timelines by name, one above the other, from layer `first` to layer `last` (both included).

    Simulated bars are outlined, measured ones solid. bounds: seconds from a timeline's own start of the chosen layers,
    drawn as a dashed line with its value; lanes: how many of the GPUs, from the first, are drawn (None: all);
    second: what names of hatched bars end with.
    """
    parts = {name: _stretch(timeline, first, last) for name, timeline in timelines.items()}
    longest = max((events["end"].max() for events in parts.values() if len(events)), default=0.0)
    factor, unit = scale_of(longest, TIME)
    lanes = lanes or max(len(timeline.resources) for timeline in timelines.values())
    figure = make_subplots(
        len(parts),
        1,
        shared_xaxes=True,
        vertical_spacing=min(0.08, 0.2 / len(parts)),
        subplot_titles=[
            f"{plain(name)} · {seconds(parts[name]['end'].max())}" if len(parts[name]) else plain(name)
            for name in parts
        ],
    )
    seen: set[str] = set()
    for row, (name, events) in enumerate(parts.items(), start=1):
        _draw(figure, row, events, timelines[name], factor, seen, second)
        _name_lanes(figure, row, timelines[name].resources[:lanes])
        if bounds and name in bounds:
            figure.add_vline(
                x=bounds[name] / factor,
                line={"dash": "dash", "width": 1.5, "color": NEUTRAL},
                row=row,
                col=1,
                annotation={"text": f"bound {seconds(bounds[name])}", "font": {"size": 11}},
                annotation_position="top",
            )
    figure.update_xaxes(range=[0, longest / factor * 1.02])
    figure.update_xaxes(title=f"time, {unit}", row=len(parts))
    for annotation in figure.layout.annotations[: len(parts)]:
        annotation.update(x=0, xanchor="left", font_size=13)
    # Two models have twice as many kinds, whose legend takes a second row.
    second_row = 26 * any((events["model"] > 0).any() for events in parts.values())
    height = max(170, 26 * lanes + 60) * len(parts) + 110 + second_row
    return finish(
        figure, title, height, barmode="overlay", bargap=0.1, top=84 + second_row, legend=legend_above(height)
    )


def _stretch(timeline: Timeline, first: int, last: int) -> pd.DataFrame:
    events = timeline.events
    events = events[(events["layer"] >= first) & (events["layer"] <= last)]
    origin = events["start"].min() if len(events) else 0.0
    return events.assign(start=events["start"] - origin, end=events["end"] - origin)


def _draw(
    figure: go.Figure, row: int, events: pd.DataFrame, timeline: Timeline, factor: float, seen: set[str], second: str
) -> None:
    measured = timeline.source == "measured"
    short = [name.split(" · ")[0] for name in timeline.resources]
    for model, kind in product(range(2), KINDS):
        events_of_kind = events[(events["kind"] == kind) & (events["model"] == model)]
        if not len(events_of_kind):
            continue
        colour, name = KIND_COLOURS[kind], KIND_TITLES[kind] + second * model
        figure.add_bar(
            x=(events_of_kind["end"] - events_of_kind["start"]) / factor,
            base=events_of_kind["start"] / factor,
            y=events_of_kind["resource"] + _lane_shift(events_of_kind),
            width=0.36,
            orientation="h",
            marker={
                "color": colour,
                "opacity": 1.0 if measured else 0.55,
                "line": {"color": colour, "width": 1.2},
                "pattern": {"shape": "/" if model else "", "size": 6, "solidity": 0.35},
            },
            name=name,
            legendgroup=name,
            showlegend=name not in seen,
            customdata=_hover(events_of_kind, short, second),
            hovertemplate="%{customdata}<extra></extra>",
            row=row,
            col=1,
        )
        seen.add(name)
    path = _critical_path(events)
    figure.add_scatter(
        x=path["time"] / factor,
        y=path["lane"],
        mode="lines",
        line={"color": MARK, "width": 2},
        name="Critical path",
        legendgroup="critical",
        showlegend="critical" not in seen,
        hoverinfo="skip",
        row=row,
        col=1,
    )
    seen.add("critical")


def _name_lanes(figure: go.Figure, row: int, names: tuple[str, ...]) -> None:
    figure.update_yaxes(
        tickvals=list(range(len(names))),
        ticktext=[plain(name) for name in names],
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
