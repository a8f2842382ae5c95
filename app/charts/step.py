"""Training steps: the communication that stayed exposed, as stacked bars and on the timeline."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from app.charts import stacks, theme
from engine.compare.figures import Metrics
from engine.timeline import COMPUTE_KINDS, Timeline
from engine.units import TIME, scale_of, seconds, share, size

MOST_BARS = 5000
"""Events drawn as bars; a browser gets slow above, so a part of the step must be chosen."""
MOST_LANES = 4
"""Groups of GPUs drawn for each plan: those that compute longest."""
EXPOSED, EXPOSED_TITLE = theme.EXPOSED, theme.PARTS["communication"][0]
PARTS = ("communication", "overlapped", "computation", "idle")
"""The parts of `Timeline.decomposition`."""

Phase = Literal["step", "forward", "backward"]


def decomposition(plans: dict[str, Metrics], baseline: str | None = None, dark: bool = False) -> go.Figure:
    """One stacked bar for each plan, fastest first, as Lancet's Figure 13; every bar's own bound is a dashed line through it.

    baseline: name of the plan with which the fastest one's exposed communication is compared
    dark: the page's theme
    """
    factor, unit = scale_of(max(plan.total for plan in plans.values()), TIME)
    names, figures = list(plans), list(plans.values())
    rows = np.arange(len(names))
    figure = go.Figure()
    for key in PARTS:
        title = theme.PARTS[key][0]
        values = np.array([metrics.decomposition[key] for metrics in figures])
        if key == "idle" and not values.any():
            continue
        figure.add_bar(
            x=values / factor,
            y=rows + stacks.BELOW,
            orientation="h",
            name=title,
            width=stacks.BAR,
            marker=theme.hatched(key),
            **theme.tips(
                f"{theme.plain(name)}<br>{title}: {seconds(value)}, {share(value / (metrics.total or 1))}"
                for name, metrics, value in zip(names, figures, values, strict=True)
            ),
        )
    figure.add_scatter(
        **theme.strokes([metrics.order_bound / factor for metrics in figures], rows + stacks.BELOW, stacks.ACROSS),
        mode="lines",
        name="Bound: any schedule",
        line={"dash": "dash", "width": 1.5, "color": theme.ink(dark)},
        hoverinfo="skip",
    )
    longest = max(metrics.total for metrics in figures) / factor
    figure.update_xaxes(title=f"time of one step, {unit} (simulated)", range=[0, longest * 1.02])
    labels = [
        stacks.label(name, f"{seconds(metrics.total)}, {share(metrics.order_gap)} above bound {seconds(metrics.order_bound)}")
        for name, metrics in plans.items()
    ]
    return stacks.arrange(figure, _finding(plans, baseline), labels, rows, dark)


def _finding(plans: dict[str, Metrics], baseline: str | None) -> str:
    best = next(iter(plans))
    own = plans[best].decomposition["communication"]
    if baseline in plans and baseline != best:
        theirs = plans[baseline].decomposition["communication"]
        if theirs > own:
            return f"{theme.short(best)} hides {share(1 - own / theirs)} of {theme.short(baseline)}'s exposed communication"
    total = plans[best].total or 1.0
    return f"{theme.short(best)} waits {share(own / total)} of its {seconds(plans[best].total)} for the network"


@dataclass(frozen=True, eq=False)
class Stretch:
    """A part of a step's timeline, from its own 0.

    events: as in `Timeline`, cut to the part, with `label`; only those of `lanes`
    lanes: resources of the timeline
    exposed: by lane, float64[interval, 2] when the network is busy and nothing is computed
    backward: by lane, start of the backward pass; None if the part lies on one side of it
    """

    events: pd.DataFrame
    lanes: tuple[int, ...]
    exposed: tuple[np.ndarray, ...]
    length: float
    backward: tuple[float | None, ...]


def begin_of_backward(timeline: Timeline) -> np.ndarray:
    """float64[resource]: seconds until the first gradient is computed; the whole step if none is."""
    gradients = timeline.events[timeline.events["kind"].isin(["dx", "dw"])]
    firsts = gradients.groupby("resource")["start"].min()
    return firsts.reindex(range(len(timeline.resources)), fill_value=timeline.total).to_numpy()


def layers_of(timelines: list[Timeline]) -> list[int]:
    """Model layers that have events, ascending."""
    return sorted({layer for timeline in timelines for layer in timeline.events["layer"].unique().tolist() if layer >= 0})


def stretch(timeline: Timeline, phase: Phase = "step", first: int = 0, last: int | None = None) -> Stretch:
    """The whole step, or from the first start to the last end of model layers `first` … `last` in one phase, with everything
    that runs meanwhile."""
    low, high = _window(timeline, phase, first, last)
    lanes, turns = _lanes(timeline), begin_of_backward(timeline)
    inside = _drawn(timeline.events, lanes, low, high)
    events = timeline.events[inside]
    labels = np.array(timeline.labels)[inside] if timeline.labels else ""
    events = events.assign(
        start=events["start"].clip(lower=low) - low, end=events["end"].clip(upper=high) - low, label=labels
    ).reset_index(drop=True)
    exposed = tuple(_cut(timeline.exposed_intervals(lane), low, high) for lane in lanes)
    backward = tuple(float(turns[lane] - low) if low < turns[lane] < high else None for lane in lanes)
    return Stretch(events, lanes, exposed, high - low, backward)


def _window(timeline: Timeline, phase: Phase, first: int, last: int | None) -> tuple[float, float]:
    """Begin and end of a part, in seconds of the timeline."""
    if phase == "step":
        return 0.0, timeline.total
    events, turns = timeline.events, begin_of_backward(timeline)
    in_phase = (events["layer"] >= first) & (events["layer"] <= (np.inf if last is None else last))
    before = events["start"] < turns[events["resource"]]
    in_phase = events[in_phase & (before if phase == "forward" else ~before)]
    return (float(in_phase["start"].min()), float(in_phase["end"].max())) if len(in_phase) else (0.0, 0.0)


def _lanes(timeline: Timeline) -> tuple[int, ...]:
    """Resources to draw."""
    return tuple(sorted(np.argsort(-timeline.busy("compute"), kind="stable")[:MOST_LANES].tolist()))


def _drawn(events: pd.DataFrame, lanes: tuple[int, ...], low: float, high: float) -> np.ndarray:
    """bool[event]"""
    return ((events["end"] > low) & (events["start"] < high) & events["resource"].isin(lanes)).to_numpy()


def _cut(intervals: np.ndarray, low: float, high: float) -> np.ndarray:
    inside = np.clip(intervals, low, high) - low
    return inside[inside[:, 1] > inside[:, 0]]


def last_that_fits(timelines: list[Timeline], phase: Phase, first: int, last: int) -> int:
    """The last model layer up to which all timelines together can be drawn; at least `first`."""
    lanes = [_lanes(timeline) for timeline in timelines]

    def too_many(layer: int) -> bool:
        windows = [_window(timeline, phase, first, layer) for timeline in timelines]
        bars = (
            _drawn(timeline.events, own, *window).sum() for timeline, own, window in zip(timelines, lanes, windows, strict=True)
        )
        return sum(bars) > MOST_BARS

    layers = [layer for layer in layers_of(timelines) if first <= layer <= last]
    fitting = bisect_left(layers, True, key=too_many)
    return layers[fitting - 1] if fitting else first


TITLE, NAME, THIN, LANE, GAP, PIXELS = 0.7, 0.34, 0.16, 0.32, 0.14, 66
"""Heights on the y axis: a plan's title, a lane's name, the exposed marks, a half-lane, and between lanes; pixels of 1."""


ABOVE, BELOW = 24, 96
"""Pixels above the plot besides the legend, and below it (times and range bar)."""


def longest_waits(part: Stretch) -> list[tuple[float, float]]:
    """Begin and end of the exposed communication of a part's first lane, in seconds from its begin, the longest first."""
    waits = part.exposed[0] if part.exposed else np.empty((0, 2))
    return [tuple(wait) for wait in waits[np.argsort(waits[:, 0] - waits[:, 1], kind="stable")].tolist()]


def step_gantt(
    timelines: dict[str, Timeline],
    parts: dict[str, Stretch],
    title: str,
    bounds: dict[str, float] | None = None,
    view: tuple[float, float] | None = None,
) -> go.Figure:
    """The parts of the timelines by name, one above the other on one time axis, with a slider below to zoom.

    Measured bars have no outline. Every group of alike GPUs has marks at exposed communication, all-to-alls, all-reduces, and
    computation.
    bounds: seconds from the start of the part, as a dashed line with its value
    view: seconds from the start of the part that are in sight; None: all
    """
    longest = max((part.length for part in parts.values()), default=0.0)
    factor, unit = scale_of(longest, TIME)
    figure, seen, ticks, y = go.Figure(), set(), {}, 0.0
    notes: list[dict] = []
    lines: list[dict] = []
    for name, part in parts.items():
        top, names = y, timelines[name].resources
        alone = len(part.lanes) == 1
        text = f"{theme.plain(name)} · {seconds(part.length)}" + (f" · {theme.plain(names[part.lanes[0]])}" if alone else "")
        notes.append(_text(None, y + 0.22, text, 13, "left"))
        y += TITLE
        for lane, exposed, backward in zip(part.lanes, part.exposed, part.backward, strict=True):
            if not alone:
                notes.append(_text(None, y + NAME / 2, theme.plain(names[lane]), theme.SMALLEST, "left"))
                y += NAME
            own = part.events[part.events["resource"] == lane]
            hosts = bool((own["stream"] == "host").any())
            places = _places(y, hosts)
            _draw_exposed(figure, exposed, places["exposed"], factor, seen)
            _draw_lane(figure, own, exposed, places, factor, timelines[name].source == "simulated", seen)
            ticks |= {place: what for what, place in places.items()}
            if backward is not None:
                begins = top + TITLE if lane == part.lanes[0] else y
                lines.append(_upright(backward / factor, begins, y + THIN + (3 + hosts) * LANE, "dot"))
                if lane == part.lanes[0]:
                    notes.append(_text(backward / factor, begins - 0.16, "forward | backward", theme.SMALLEST, "center"))
            y += THIN + (3 + hosts) * LANE + GAP
        if bounds and name in bounds:
            at, text = bounds[name] / factor, f"bound {seconds(bounds[name])}"
            lines.append(_upright(at, top + TITLE, y - GAP, "dash"))
            notes.append(_text(at, top + TITLE - 0.16, text, theme.SMALLEST, "center"))
    kinds = {kind for part in parts.values() for kind in part.events["kind"].unique()}
    above = ABOVE + theme.LINE * theme.legend_lines([EXPOSED_TITLE, *(theme.KIND_TITLES[kind] for kind in kinds)])
    plot = int(PIXELS * y / 0.9)
    height = plot + above + BELOW
    span = [0, longest / factor * 1.02 or 1]
    seen_part = span if view is None else [view[0] / factor, view[1] / factor]
    figure.update_xaxes(ticksuffix=f" {unit}", range=seen_part, rangeslider=theme.range_bar(span, plot))
    tickfont = {"size": theme.SMALLEST}
    figure.update_yaxes(
        tickvals=list(ticks), ticktext=list(ticks.values()), tickfont=tickfont, range=[y, -0.05], showgrid=False, zeroline=False
    )
    drawn = {"annotations": notes, "shapes": lines}
    return theme.finish(figure, title, height, top=above, barmode="overlay", legend=theme.legend_above(height), **drawn)


def _text(x: float | None, y: float, text: str, size: int, anchor: str) -> dict:
    """A note. x: None: at the left edge, whatever part is in sight"""
    look = {"showarrow": False, "font": {"size": size}, "xanchor": anchor, "yanchor": "middle"}
    place = {"x": 0, "xref": "x domain"} if x is None else {"x": x}
    return {"y": y, "text": text} | place | look


def _upright(x: float, top: float, bottom: float, dash: str) -> dict:
    line = {"dash": dash, "width": 1.5, "color": theme.NEUTRAL}
    return {"type": "line", "x0": x, "x1": x, "y0": top, "y1": bottom, "line": line}


def _places(y: float, hosts: bool) -> dict[str, float]:
    """Return the middle of every lane of a GPU that begins at y. hosts: True if copies between it and its host have one"""
    last = {"host": y + THIN + 3.5 * LANE} if hosts else {}
    return {
        "exposed": y + THIN / 2,
        "all-to-all": y + THIN + LANE / 2,
        "all-reduce": y + THIN + 1.5 * LANE,
        "compute": y + THIN + 2.5 * LANE,
    } | last


def _draw_exposed(figure: go.Figure, exposed: np.ndarray, y: float, factor: float, seen: set[str]) -> None:
    if not len(exposed):
        return
    length = exposed[:, 1] - exposed[:, 0]
    figure.add_bar(
        x=length / factor,
        base=exposed[:, 0] / factor,
        y=np.full(len(exposed), y),
        width=THIN * 0.8,
        orientation="h",
        name=EXPOSED_TITLE,
        legendgroup=EXPOSED_TITLE,
        showlegend=EXPOSED_TITLE not in seen,
        marker=theme.hatched("communication"),
        **theme.tips(
            f"{EXPOSED_TITLE}<br>{seconds(duration)}, from {seconds(start)}"
            for duration, start in zip(length, exposed[:, 0], strict=True)
        ),
    )
    seen.add(EXPOSED_TITLE)


def _draw_lane(
    figure: go.Figure,
    events: pd.DataFrame,
    exposed: np.ndarray,
    places: dict[str, float],
    factor: float,
    predicted: bool,
    seen: set[str],
) -> None:
    for kind in theme.KIND_TITLES:
        events_of_kind = events[events["kind"] == kind]
        if not len(events_of_kind):
            continue
        name = theme.KIND_TITLES[kind]
        own_lane = {"all_reduce": "all-reduce", "host_copy": "host"} | dict.fromkeys(COMPUTE_KINDS, "compute")
        half = own_lane.get(kind, "all-to-all")
        figure.add_bar(
            x=(events_of_kind["end"] - events_of_kind["start"]) / factor,
            base=events_of_kind["start"] / factor,
            y=np.full(len(events_of_kind), places[half]),
            width=LANE * 0.88,
            orientation="h",
            name=name,
            legendgroup=name,
            legendrank=theme.rank(kind),
            showlegend=name not in seen,
            marker=theme.bar(kind, predicted),
            customdata=_hover(events_of_kind, exposed),
            hovertemplate="%{customdata}<extra></extra>",
        )
        seen.add(name)


def _hover(events: pd.DataFrame, exposed: np.ndarray) -> list[str]:
    waited = exposed_seconds(events, exposed)
    texts = []
    for event, waiting in zip(events.itertuples(), waited, strict=True):
        lines = [
            theme.plain(event.label),
            theme.KIND_TITLES[event.kind] + (f", layer {event.layer}" if event.layer >= 0 else ""),
        ]
        length = f"{seconds(event.end - event.start)}, from {seconds(event.start)}"
        if event.stream == "network":
            length = f"{size(event.bytes)} · {length}"
            lines += [length, f"exposed for {seconds(waiting)}" if waiting > 0 else "hidden under computation"]
        else:
            lines.append(f"{size(event.bytes)} · {length}" if event.bytes else length)
        texts.append("<br>".join(lines))
    return texts


def exposed_seconds(events: pd.DataFrame, exposed: np.ndarray) -> np.ndarray:
    """float64[event]: seconds of every event that lie in the exposed intervals."""
    if not len(exposed):
        return np.zeros(len(events))
    so_far = np.concatenate([[0.0], np.cumsum(exposed[:, 1] - exposed[:, 0])])
    times = np.column_stack([exposed[:, 0], exposed[:, 1]]).ravel()
    passed = np.column_stack([so_far[:-1], so_far[1:]]).ravel()
    return np.interp(events["end"], times, passed) - np.interp(events["start"], times, passed)
