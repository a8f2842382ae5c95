"""The chart of one thing changed over a whole range."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, SECOND, TEAL, finish, legend_below, plain
from engine.studies.curve import ANEW, CurvePoint
from engine.units import TIME, ratio, scale_of, seconds, share

LEGEND = legend_below(-0.2)
STYLES = ((TEAL, "solid", "circle"), (SECOND, "dash", "diamond"), (NEUTRAL, "dot", "square"))
AXES = {
    "network": "network bandwidth, × today's",
    "compute": "computation speed, × today's",
    "latency": "latency, × today's",
    "contention": "contention: how much longer a byte takes for every further send at a port",
    "tokens": "tokens, × today's",
    "width": "model width, × today's",
    "noise": "share of traffic that is noise",
}

SHARES = ("contention", "noise")
"""What is changed by a share, not by a factor."""


def curve(
    points: Sequence[CurvePoint], field: str, series: Sequence[str], complete: bool = True, tag: str = "simulated"
) -> go.Figure:
    """Time against what is changed, a line for every plan as it is and one for plans made for each value.

    series: names of the plans, the one that is looked at first; tag: what the times are.
    """
    factor, unit = scale_of(max((point.total for point in points if point.total is not None), default=1.0), TIME)
    values = sorted({point.value for point in points})
    ratios = field not in SHARES
    log = ratios and min(values, default=0.0) > 0
    figure = go.Figure()
    for turn, name in enumerate([*series, ANEW]):
        points_of_plan = [point for point in points if point.series == name and point.total is not None]
        if not points_of_plan:
            continue
        colour, dash, symbol = STYLES[min(turn, 2) if name != ANEW else 2]
        figure.add_scatter(
            x=[point.value for point in points_of_plan],
            y=[point.total / factor for point in points_of_plan],
            mode="lines+markers",
            name=plain(name),
            line={"color": colour, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 8},
            customdata=[
                f"{plain(name)}<br>{_value(point.value, ratios)}: {seconds(point.total)}" for point in points_of_plan
            ],
            hovertemplate="%{customdata}<extra></extra>",
        )
    ends = np.log10([values[0], values[-1]]) if log and values else None
    figure.update_xaxes(
        title=AXES[field],
        type="log" if log else "linear",
        tickvals=values,
        showgrid=False,
        ticktext=[_value(value, ratios) for value in values],
        range=None if ends is None else [ends[0] - 0.05, ends[1] + 0.05],
    )
    figure.update_yaxes(title=f"time, {unit} ({tag})")
    figure.update_yaxes({"type": "log", "dtick": "D2"} if log else {"rangemode": "tozero"})
    return finish(figure, _course(points, series, ratios, complete), 420, legend=LEGEND)


def _value(value: float, ratios: bool) -> str:
    return ratio(value) if ratios else f"{100 * value:g} %"


def _course(points: Sequence[CurvePoint], series: Sequence[str], ratios: bool, complete: bool) -> str:
    """How the first plan does beside a plan made for each value, or else beside the second."""
    totals = {
        name: {point.value: point.total for point in points if point.series == name and point.total}
        for name in (*series, ANEW)
    }
    own = totals[series[0]]
    sentence = ""
    if anew := {value: own[value] / total for value, total in totals[ANEW].items() if value in own}:
        worst = max(anew, key=anew.get)
        sentence = (
            f"keeping {plain(series[0])} costs at most {share(max(anew[worst] - 1, 0))} (at {_value(worst, ratios)})"
        )
    elif len(series) > 1:
        other = {value: total / own[value] for value, total in totals[series[1]].items() if value in own}
        behind = [value for value, relative in other.items() if relative < 1]
        name = plain(series[1].split(" (")[0])
        if behind:
            sentence = f"{name} is faster at {_value(behind[0], ratios)}"
            sentence += f" and {len(behind) - 1} more values" if len(behind) > 1 else ""
        elif other:
            stretch = " to ".join(
                dict.fromkeys(ratio(relative) for relative in (min(other.values()), max(other.values())))
            )
            sentence = f"{name} takes {stretch} as long as {plain(series[0])}"
    if not sentence:
        return "No points yet" if not own else f"{plain(series[0])} takes {seconds(min(own.values()))} at best"
    return sentence[0].upper() + sentence[1:] if complete else f"So far: {sentence}"
