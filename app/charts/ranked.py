"""All plans in one chart: the time of each, its bound, and the baseline."""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, SMALLEST, TEAL, finish, ink, legend_above, name_above_bar, plain, shortened, strokes, tips
from engine.compare.standing import gain_in_words
from engine.result import NOT_BOUNDED
from engine.units import TIME, digits, scale_of, seconds

MOST = 20
"""Plans with a bar: the fastest, and always the open and the deployed one."""
TIMES = 64
"""Pixels at the right, of the times in words."""
ROW = 30
"""Pixels of a bar and the name above it."""
BAR, BELOW = 0.36, 0.24
"""Thickness of a bar, and its distance below the middle of its row, in rows."""
TICK = BAR / 2 + 0.06
"""Half of a mark across a bar, in rows: it ends below the name."""
LABEL = 44
"""Most characters above a bar: a window of 1024 has room for them."""


def ranked(
    names: Sequence[str],
    times: Sequence[float],
    bounds: Sequence[float],
    deployed: int | None = None,
    opened: int | None = None,
    dark: bool = False,
    so_far: bool = False,
    scope: str = "",
) -> go.Figure:
    """A bar for each plan, the fastest on top, with a tick at its bound and a line at the baseline's time.

    times, bounds: seconds, NaN for a plan without a bound
    deployed, opened: places in them
    dark: the page's theme
    so_far: True if more plans are on their way
    scope: of the gain, as `, in sample`
    """
    order = sorted(range(len(names)), key=lambda at: times[at])
    drawn = [at for rank, at in enumerate(order) if rank < MOST or at in (deployed, opened)]
    factor, unit = scale_of(max(times[at] for at in drawn), TIME)
    place = np.arange(len(drawn))
    figure = go.Figure()
    bars = place + BELOW
    for title, colour, own in (("The open plan", TEAL, True), ("Other plans", NEUTRAL, False)):
        rows = [row for row in place if (drawn[row] == opened) is own]
        if rows:
            figure.add_bar(
                x=[times[drawn[row]] / factor for row in rows],
                y=bars[rows],
                orientation="h",
                width=BAR,
                name=title,
                showlegend=False,
                marker={"color": colour},
                **tips(_tip(names[at], times[at], bounds[at]) for at in (drawn[row] for row in rows)),
            )
    proven = [row for row in place if not math.isnan(bounds[drawn[row]])]
    if proven:
        figure.add_scatter(
            **strokes([bounds[drawn[row]] / factor for row in proven], bars[proven], TICK),
            mode="lines",
            name="Bound",
            line={"width": 2, "color": ink(dark)},
            hoverinfo="skip",
        )
    if deployed is not None:
        figure.add_scatter(
            **strokes([times[deployed] / factor] * len(drawn), bars, TICK),  # not through the names between bars
            mode="lines",
            name=f"Deployed, {seconds(times[deployed])}",
            line={"width": 1.5, "dash": "dot", "color": ink(dark)},
            hoverinfo="skip",
        )
    notes = []
    font = {"size": SMALLEST, "color": ink(dark)}
    right = {"x": 1, "xref": "paper", "xanchor": "left", "showarrow": False, "font": font}
    for at, bar in zip(drawn, bars, strict=True):
        label = _label(names[at], at == deployed, at == opened)
        # Times stand in a column of their own, where no line crosses them.
        notes += [right | {"y": bar, "text": f" {seconds(times[at])}"}, name_above_bar(label, bar - BAR / 2, dark)]
    longest = max(times[at] for at in drawn) / factor
    height = 138 + ROW * len(drawn)
    layout = {
        "xaxis": {"title": f"time, {unit} (simulated)", "range": [0, longest * 1.02 or 1]},
        "yaxis": {"range": [len(drawn) - 0.4, -0.6], "visible": False},
        "margin": {"r": TIMES},
        "annotations": notes,
    }
    title = _finding(names, times, order[0], deployed, scope, " so far" * so_far, len(drawn))
    return finish(figure, title, height, top=76, barmode="overlay", legend=legend_above(height), **layout)


def _label(name: str, deployed: bool, opened: bool) -> str:
    """Shorten a name to the room above a bar; the open plan's has the mark that it has in the table."""
    short = plain(shortened(name, LABEL))
    return ("▸ " if opened else "") + short + (" (deployed)" if deployed and "deployed" not in name else "")


def _tip(name: str, time: float, bound: float) -> str:
    if math.isnan(bound):
        return f"{plain(name)}<br>{seconds(time)}, {NOT_BOUNDED}"
    above = f"{digits(time / bound)}× its bound of {seconds(bound)}" if bound else "no time at all"
    return f"{plain(name)}<br>{seconds(time)}, {above}"


def _finding(
    names: Sequence[str], times: Sequence[float], best: int, deployed: int | None, scope: str, so_far: str, drawn: int
) -> str:
    part = so_far + ("" if drawn == len(names) else f" ({drawn} of {len(names)} plans)")
    if deployed is None or not times[best]:
        return f"{plain(names[best])} is fastest: {seconds(times[best])}{part}"
    if times[best] == times[deployed]:
        return f"No plan beats what is deployed{part}"
    against = gain_in_words(times[deployed] / times[best], "what is deployed")
    return f"{plain(names[best])} takes {seconds(times[best])}, {against}{scope}{part}"
