"""Charts of whole serving steps: the parts of their time."""

import numpy as np
import plotly.graph_objects as go

from app.charts import stacks
from app.charts.theme import PARTS, ink, short, strokes
from engine.result import NOT_BOUNDED
from engine.serving.figures import ServingFigures
from engine.units import TIME, scale_of, seconds, share

SAME = 0.0005
"""Gain too small to be seen."""


def parts(plans: dict[str, ServingFigures], dark: bool = False) -> go.Figure:
    """One stacked bar for each plan: every kind of operator as if nothing overlapped. The open plan comes first.

    A solid line is the step itself, which overlap makes shorter; the dashed one is its bound.
    dark: the page's theme
    """
    names, figures = list(plans), list(plans.values())
    longest = max(sum(served.parts.values()) for served in figures)
    factor, unit = scale_of(longest, TIME)
    rows = np.arange(len(names))
    figure = go.Figure()
    stacks.bars(figure, {name: served.parts for name, served in plans.items()}, rows, factor, "work")
    if any(served.hidden for served in figures):
        stacks.whole_steps(figure, [served.seconds for served in figures], rows, factor, dark)
    _draw_bounds(figure, figures, factor, ink(dark))
    figure.update_xaxes(title=f"time of one step, {unit} (simulated)", range=[0, longest / factor * 1.02])
    labels = []
    for name, served in plans.items():
        hidden = f", {seconds(served.hidden)} hidden" if served.hidden else ""
        bound = f"order {NOT_BOUNDED}" if served.bound is None else f"bound {seconds(served.bound)}"
        labels.append(stacks.label(name, f"{seconds(served.seconds)}{hidden}, {bound}"))
    return stacks.arrange(figure, _finding(plans), labels, rows, dark, across=3)


def _draw_bounds(figure: go.Figure, figures: list[ServingFigures], factor: float, colour: str) -> None:
    """Draw the bounds, where there are any."""
    places = np.arange(len(figures)) + stacks.BELOW
    bounds = [(served.bound / factor, place) for served, place in zip(figures, places, strict=True) if served.bound is not None]
    if bounds:
        figure.add_scatter(
            **strokes(*zip(*bounds, strict=True), stacks.ACROSS),
            mode="lines",
            name="Bound: any send order",
            line={"dash": "dash", "width": 1.5, "color": colour},
            hoverinfo="skip",
        )


def _finding(plans: dict[str, ServingFigures]) -> str:
    """The largest part of the first plan's step, and the same part under the other plan."""
    (name, served), *others = plans.items()
    kind = max(served.parts, key=served.parts.get)
    title = PARTS[kind][0]
    work = "work" if served.hidden else "step"
    most = f"{title}: {share(served.parts[kind] / sum(served.parts.values()))} of its {work}"
    for other, beside in others:
        if abs(served.gain_over(beside)) < SAME:
            return f"{short(name)} takes as long as {short(other)}. {most}"
        return f"{short(name)} takes {seconds(served.seconds)}, {short(other)} {seconds(beside.seconds)}. {most}"
    return f"{short(name)} takes {seconds(served.seconds)}. {most}"
