"""Stacked bars, one for each plan: names above them, since a narrow window has no room at their side, and a legend below."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import (
    PARTS,
    finish,
    hatched,
    in_order,
    ink,
    legend_at_foot,
    name_above_bar,
    plain,
    shortened,
    strokes,
    tips,
)
from engine.units import seconds, share

ROW, BAR, BELOW = 38, 0.45, 0.2
"""Pixels of a bar and its name; thickness of a bar, and its distance below the middle of its row, in rows."""
ACROSS = 0.3
"""Half of a line across a bar, in rows."""
AXIS, ENTRIES = 64, 19
"""Pixels of the time axis with a title of two lines, and of a line of the legend."""
ENTRY = 22
"""Characters of a legend's entry up to which a narrow window has room for two on a line."""
TOP = 44
"""Pixels above the bars, with the title."""
LABEL = 56
"""Most characters above a bar: a window of 1024 has room for them next to a form."""


def bars(figure: go.Figure, plans: Mapping[str, Mapping[str, float]], rows: Sequence[float], factor: float, of: str) -> None:
    """Draw the parts of every plan as one stacked bar, in the order in which all charts stack them.

    plans: seconds by kind of part, by the plan's name
    rows: of the plans
    factor: seconds of one unit of the axis
    of: the sum of the parts, in words
    """
    places = np.asarray(rows) + BELOW
    for kind in in_order(kind for parts in plans.values() for kind in parts):
        values = np.array([parts.get(kind, 0.0) for parts in plans.values()])
        if not values.any():
            continue
        title = PARTS[kind][0]
        shares = [value / (sum(parts.values()) or 1.0) for parts, value in zip(plans.values(), values, strict=True)]
        figure.add_bar(
            x=values / factor,
            y=places,
            orientation="h",
            name=title,
            width=BAR,
            marker=hatched(kind),
            **tips(
                f"{plain(name)}<br>{title}: {seconds(value)}, {share(part)} of the {of}"
                for name, value, part in zip(plans, values, shares, strict=True)
            ),
        )


def whole_steps(figure: go.Figure, times: Sequence[float], rows: Sequence[float], factor: float, dark: bool) -> None:
    """Draw every plan's step itself as a line across its bar, for parts of which some are hidden.

    times: seconds
    rows, factor: as of the bars
    dark: the page's theme
    """
    figure.add_scatter(
        **strokes([time / factor for time in times], np.asarray(rows) + BELOW, ACROSS),
        mode="lines",
        name="Step, the rest hidden",
        line={"width": 3, "color": ink(dark)},
        hoverinfo="skip",
    )


def label(name: str, said: str) -> str:
    """Text above a bar: a plan's name, shortened to the room that `said` leaves, and `said`."""
    return f"{plain(shortened(name, LABEL - len(said)))}: {said}"


def arrange(
    figure: go.Figure, title: str, labels: Sequence[str], rows: Sequence[float], dark: bool, across: int = 2
) -> go.Figure:
    """The common look of a figure with bars that lie `BELOW` the middle of these rows.

    labels: text above each bar
    dark: the page's theme
    across: short entries of the legend in a line; two next to a form
    """
    names = [name_above_bar(said, row + BELOW - BAR / 2, dark) for said, row in zip(labels, rows, strict=True)]
    entries = [len(trace.name) for trace in figure.data if trace.showlegend is not False]
    below = AXIS + ENTRIES * (-(-len(entries) // across) if max(entries) <= ENTRY else len(entries))
    height = TOP + round(ROW * (max(rows) + 1.2)) + below
    # As wide as it can be: a legend is given no more than the plot, and two of the longest entries just fit a narrow window.
    layout = {"margin": {"b": below, "l": 6, "r": 0}, "yaxis": {"range": [max(rows) + 0.6, -0.6], "visible": False}}
    return finish(figure, title, height, TOP, barmode="stack", legend=legend_at_foot(), annotations=names, **layout)
