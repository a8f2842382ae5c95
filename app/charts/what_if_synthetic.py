"""Charts of a synthetic workload: how popular its experts are, and how that changes from step to step."""

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, SEQUENTIAL, TEAL, finish
from engine.units import ratio

MOST_WHISKERS = 64
"""Experts whose bars have room for whiskers."""


def popularity(load: np.ndarray, ranked: bool = True) -> go.Figure:
    """Share of token copies of every expert: the mean over the layers and the spread between them. load: float64[layer,
    expert]; ranked: the most popular first in each layer, else by the experts' own numbers."""
    shares = 100 * load / np.maximum(load.sum(axis=1, keepdims=True), 1)
    shown = -np.sort(-shares, axis=1) if ranked else shares
    mean = shown.mean(axis=0)
    figure = go.Figure()
    figure.add_bar(
        x=np.arange(load.shape[1]) + ranked,
        y=mean,
        marker={"color": TEAL},
        name="share",
        error_y={
            "array": shown.max(axis=0) - mean,
            "arrayminus": mean - shown.min(axis=0),
            "type": "data",
            "thickness": 1,
            "width": 2,
            "color": NEUTRAL,
        }
        if load.shape[1] <= MOST_WHISKERS
        else None,
        hovertemplate=f"{'rank' if ranked else 'expert'} %{{x}}: %{{y:.2f}} % of the copies<extra></extra>",
    )
    even = 100 / load.shape[1]
    figure.add_hline(y=even, line={"dash": "dot", "width": 1, "color": NEUTRAL})
    figure.update_xaxes(title="expert, by popularity in its layer" if ranked else "expert", showgrid=False)
    figure.update_yaxes(title="token copies, %", rangemode="tozero")
    return finish(figure, f"The most popular expert gets {ratio(mean.max() / even)} the mean", 300, showlegend=False)


def steps(load: np.ndarray) -> go.Figure:
    """Share of the token copies of a step that every expert gets, the sum of its layers. load: float64[step, expert]."""
    shares = 100 * load / np.maximum(load.sum(axis=1, keepdims=True), 1)
    figure = go.Figure(
        go.Heatmap(
            z=shares,
            colorscale=SEQUENTIAL,
            zmin=0,
            colorbar={"title": "copies, %"},
            hovertemplate="step %{y}, expert %{x}: %{z:.2f} % of the copies<extra></extra>",
        )
    )
    figure.update_xaxes(title="expert")
    figure.update_yaxes(title="step", autorange="reversed")
    most = ratio(float(shares.max()) * load.shape[1] / 100)
    return finish(figure, f"In its step the most popular expert gets {most} the mean", 300)
