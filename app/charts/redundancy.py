"""The gain of spare slots, and the memory that they take."""

from collections.abc import Sequence

import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, TEAL, finish
from engine.studies.judge import CONFIDENCE
from engine.studies.knee import Knee
from engine.studies.redundancy import RedundancyPoint
from engine.units import SIZE, digits, scale_of, seconds, share, signed, size

HEIGHT = 380
BAND = "rgba(0,137,123,0.3)"
"""The teal of the curve, of which it is the interval."""


def spare_slots(points: Sequence[RedundancyPoint], advised: Knee | None, held_out: bool) -> go.Figure:
    """Gain over the fewest slots with its interval, a point for every number of them that engines accept.

    points: fewest slots first, at least one; advised: None: not known yet; held_out: whether the recordings that judge are
    others than the one that was planned on
    """
    factor, unit = scale_of(max(points[-1].memory_bytes, 1.0), SIZE)
    places = list(range(len(points)))
    fewest = points[0].slots_of_gpu
    figure = go.Figure()
    figure.add_scatter(
        x=[*places, *reversed(places)],
        y=[100 * bound for bound in (*(at.interval[0] for at in points), *(at.interval[1] for at in reversed(points)))],
        fill="toself",
        fillcolor=BAND,
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_scatter(
        x=places,
        y=[100 * point.gain for point in points],
        mode="lines+markers",
        line={"color": TEAL, "width": 2},
        marker={"size": 8},
        hovertext=[_hover(point) for point in points],
        hoverinfo="text",
        showlegend=False,
    )
    for place, point in zip(places, points, strict=True):
        if advised is not None and point.slots == advised.slots:
            figure.add_scatter(
                x=[place],
                y=[100 * point.gain],
                mode="markers+text",
                marker={"symbol": "diamond", "size": 16, "color": TEAL, "line": {"color": NEUTRAL, "width": 2}},
                text=["advised"],
                textposition="top center",
                hoverinfo="skip",
                showlegend=False,
            )
    figure.add_hline(0, line={"color": NEUTRAL, "width": 1})
    figure.update_xaxes(
        title=f"spare slots per GPU (engines give every GPU as many), and their memory on all GPUs in {unit}",
        tickvals=places,
        ticktext=[f"+{point.slots_of_gpu - fewest}<br>{digits(point.memory_bytes / factor)}" for point in points],
        showgrid=False,
        zeroline=False,
        range=[-0.5, len(points) - 0.5],
    )
    figure.update_yaxes(title=f"gain {'held out' if held_out else 'in sample'}, %", zeroline=False)
    return finish(figure, _finding(points, advised), HEIGHT)


def _hover(point: RedundancyPoint) -> str:
    low, high = point.interval
    return (
        f"{point.slots} slots, {point.spare} of them spare<br>gain {signed(point.gain)}, {share(CONFIDENCE)} interval "
        f"{signed(low)} to {signed(high)}<br>{signed(point.gain_worst)} on the worst recording<br>{seconds(point.seconds)}, "
        f"balancedness {point.balancedness:.3f}, {point.planned_balancedness:.3f} as planned"
    )


def _finding(points: Sequence[RedundancyPoint], advised: Knee | None) -> str:
    if advised is None:
        return "So far one number of slots" if len(points) == 1 else f"So far {len(points)} numbers of slots"
    point, fewest = next(point for point in points if point.slots == advised.slots), points[0]
    if advised.rule == "noise":
        return "What spare slots gain here may as well be nothing"
    if point is fewest:
        return "No number of spare slots is worth its memory here"
    each = point.slots_of_gpu - fewest.slots_of_gpu
    slots = "1 spare slot per GPU brings" if each == 1 else f"{each} spare slots per GPU bring"
    return f"{slots} {share(point.gain)} for {size(point.memory_bytes)} on all GPUs"
