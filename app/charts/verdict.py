"""The gain of a plan on each part of the recordings that it was not made from."""

import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, TEAL, finish, plain
from engine.studies.judge import interval
from engine.units import seconds, share, signed
from engine.verdict import Verdict

TOGETHER = "mean"
ROW = 34
"""Pixels of a part."""


def gains(verdict: Verdict) -> go.Figure:
    """Gain and interval of every part and of their mean, with the thresholds of the gain as lines. The verdict has a part at
    least."""
    intervals = [interval(part.gain, part.error, verdict.confidence) for part in verdict.parts]
    names = [_short(part.part) for part in verdict.parts]
    figure = go.Figure()
    figure.add_scatter(
        x=[100 * part.gain for part in verdict.parts],
        y=list(range(len(names))),
        error_x=_bars([100 * (high - part.gain) for part, (_, high) in zip(verdict.parts, intervals, strict=True)]),
        mode="markers",
        marker={"color": TEAL, "size": 10},
        hovertext=[
            f"{plain(part.part)}<br>{signed(part.gain)}, {share(verdict.confidence)} interval {signed(low)} to "
            f"{signed(high)}<br>{seconds(part.seconds_deployed)} deployed, {seconds(part.seconds)} planned"
            for part, (low, high) in zip(verdict.parts, intervals, strict=True)
        ],
        hoverinfo="text",
        showlegend=False,
    )
    mean = verdict.gain_held_out
    figure.add_scatter(
        x=[100 * mean],
        y=[len(names)],
        error_x=_bars([100 * (verdict.gain_high - mean)]),
        mode="markers",
        marker={"color": TEAL, "size": 14, "symbol": "diamond"},
        hovertext=f"mean: {signed(mean)}, {signed(verdict.gain_low)} to {signed(verdict.gain_high)}",
        hoverinfo="text",
        showlegend=False,
    )
    limits = {criterion.name: criterion.threshold for criterion in verdict.criteria}
    figure.add_vline(0, line={"color": NEUTRAL, "width": 1})
    for name, text, side in (("gain", "do it", "left"), ("try_gain", "try it", "right")):
        figure.add_vline(100 * limits[name], line={"color": NEUTRAL, "width": 1, "dash": "dash"})
        figure.add_annotation(
            x=100 * limits[name],
            y=1,
            yref="paper",
            yanchor="bottom",
            xanchor=side,
            text=f"{text}: {share(limits[name])}",
            font={"size": 12},
            showarrow=False,
        )
    figure.update_xaxes(title="gain over what is deployed, %", zeroline=False)
    figure.update_yaxes(
        tickvals=list(range(len(names) + 1)),
        ticktext=[*map(plain, names), TOGETHER],
        range=[len(names) + 0.6, -0.6],
        showgrid=False,
        zeroline=False,
    )
    return finish(figure, _finding(verdict), 130 + ROW * (len(names) + 1), top=62)


def _bars(reach: list[float]) -> dict:
    return {"type": "data", "array": reach, "color": TEAL, "thickness": 2, "width": 6}


def _short(name: str) -> str:
    """A name as far as it fits beside the chart."""
    return name if len(name) <= 32 else f"{name[:31]}…"


def _finding(verdict: Verdict) -> str:
    low, high, mean = verdict.gain_low, verdict.gain_high, verdict.gain_held_out
    return f"Held out it gains {signed(mean)}; {share(verdict.confidence)} interval {signed(low)} to {signed(high)}"
