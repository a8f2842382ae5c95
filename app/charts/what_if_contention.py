"""The chart of what sends that meet at a port cost, with all of them at once and in order."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, SECOND, TEAL, finish, legend_below
from engine.studies.contention import MODES, ContentionPoint
from engine.units import TIME, ratio, scale_of, seconds

LEGEND = legend_below(-0.2)
STYLES = {
    "concurrent": (SECOND, "dash", "diamond"),
    "matched": (TEAL, "solid", "circle"),
    "two-tier": (NEUTRAL, "dot", "square"),
}


def contention(points: Sequence[ContentionPoint], pays_from: float | None, complete: bool = True) -> go.Figure:
    """Time of a placement against contention, a line for every mode of orders; values stand evenly apart.

    pays_from: the contention from which on an order is no slower than all sends at once, marked; None: there is none.
    """
    most = max((total for point in points for total in point.seconds.values()), default=1.0)
    factor, unit = scale_of(most, TIME)
    values = [point.contention for point in points]
    figure = go.Figure()
    for mode, title in MODES.items():
        totals = [point.seconds[mode] for point in points if mode in point.seconds]
        if not totals:
            continue
        colour, dash, symbol = STYLES[mode]
        figure.add_scatter(
            x=list(range(len(totals))),
            y=[total / factor for total in totals],
            mode="lines+markers",
            name=title,
            line={"color": colour, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 8},
            customdata=[
                f"{title}<br>{_percent(value)}: {seconds(total)}" for value, total in zip(values, totals, strict=True)
            ],
            hovertemplate="%{customdata}<extra></extra>",
        )
    if pays_from is not None:
        figure.add_vline(
            x=float(np.interp(pays_from, values, np.arange(len(values)))),
            line={"color": NEUTRAL, "width": 1, "dash": "dash"},
            annotation={"text": f"pays from {_percent(pays_from)}", "yanchor": "bottom"},
            annotation_position="top",
        )
    figure.update_xaxes(
        title="contention: how much longer a byte takes for every further send at a port",
        tickvals=list(range(len(values))),
        ticktext=[_percent(value) for value in values],
        showgrid=False,
    )
    figure.update_yaxes(title=f"time, {unit} (simulated)", rangemode="tozero")
    return finish(figure, _finding(points, pays_from, complete), 420, top=64, legend=LEGEND)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _finding(points: Sequence[ContentionPoint], pays_from: float | None, complete: bool) -> str:
    if not points:
        return "No points yet"
    first, last = points[0], points[-1]
    if not complete:
        return f"So far: at {_percent(last.contention)} all at once takes {seconds(last.seconds['concurrent'])}"
    gain = ratio(last.seconds["concurrent"] / (last.seconds["concurrent"] - last.saved))
    if pays_from is None and last.saved >= 0:  # stopped before it was known from where
        return f"Ordering pays at {_percent(last.contention)} contention, and is {gain} as fast"
    if pays_from is None:
        return f"Ordering does not pay up to {_percent(last.contention)} contention"
    if pays_from == first.contention:
        return f"Ordering pays as things are, and is {gain} as fast at {_percent(last.contention)} contention"
    return (
        f"Ordering pays from {_percent(pays_from)} contention on, and is {gain} as fast at {_percent(last.contention)}"
    )
