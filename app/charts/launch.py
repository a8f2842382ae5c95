"""Measured beside predicted, and the links of a testbed."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import KIND_COLOURS, KIND_TITLES, NEUTRAL, TEAL, finish, legend_above, plain
from engine.units import TIME, digits, ratio, scale_of, seconds

BESIDE = "left bars predicted, right bars measured"
TIMES = 136
"""Pixels at the right of bars, of their times in words."""
HEIGHT = 340
WRITTEN = 6
"""Pairs of bars that have room for their numbers."""


def by_kind(kinds: list[str], predicted: list[float], measured: list[float], total: tuple[float, float]) -> go.Figure:
    """Bars per step: predicted outlined, measured solid. Times in seconds; total: (predicted, measured)."""
    names = [KIND_TITLES[kind] for kind in kinds]
    colours = [KIND_COLOURS[kind] for kind in kinds]
    figure = _pairs(names, names, predicted, measured, colours)
    title = f"The run took {ratio(total[1] / total[0])} the predicted time ({BESIDE})"
    return finish(figure, title, HEIGHT, bargap=0.3)


def by_layer(layers: Sequence[int], predicted: Sequence[float], measured: Sequence[float]) -> go.Figure:
    """Bars per MoE layer: predicted outlined, measured solid. Times in seconds."""
    factors = {
        layer: after / before for layer, before, after in zip(layers, predicted, measured, strict=True) if before
    }
    title = "Seconds of every layer"
    if factors:
        worst = max(factors, key=lambda layer: abs(np.log(max(factors[layer], 1e-9))))
        title = f"Layer {worst} is furthest from its prediction: {ratio(factors[worst])} ({BESIDE})"
    names = [f"layer {layer}" for layer in layers]
    figure = _pairs(list(layers), names, predicted, measured, [TEAL] * len(names))
    figure.update_xaxes(title="MoE layer", dtick=max(1, len(layers) // 16))
    return finish(figure, title, HEIGHT, bargap=0.3)


def _pairs(
    places: Sequence[str | int],
    names: Sequence[str],
    predicted: Sequence[float],
    measured: Sequence[float],
    colours: list[str],
) -> go.Figure:
    most = max([*predicted, *measured], default=0.0)
    factor, unit = scale_of(most, TIME)
    figure = go.Figure()
    for label, values, fills in (
        ("predicted", predicted, [faint(colour) for colour in colours]),
        ("measured", measured, colours),
    ):
        figure.add_bar(
            x=places,
            y=[value / factor for value in values],
            name=label,
            offsetgroup=label,
            marker={"color": fills, "line": {"color": colours, "width": 1.5}},
            text=[seconds(value) for value in values],
            textposition="outside" if len(places) <= WRITTEN else "none",
            customdata=[f"{name}, {label}: {seconds(value)}" for name, value in zip(names, values, strict=True)],
            hovertemplate="%{customdata}<extra></extra>",
            showlegend=False,
        )
    figure.update_yaxes(title=f"time, {unit}", range=[0, most / factor * 1.18 or 1])
    return figure


def faint(colour: str) -> str:
    """The colour of what was predicted, inside its outline. colour: as #RRGGBB."""
    return f"rgba({int(colour[1:3], 16)},{int(colour[3:5], 16)},{int(colour[5:7], 16)},0.15)"


def totals(
    names: Sequence[str], predicted: Sequence[float], passes: Sequence[Sequence[float]], title: str
) -> go.Figure:
    """Of every plan the predicted time, outlined, and the median of its timed passes, solid, with the fastest and the slowest
    pass as whiskers. Seconds."""
    medians = np.array([np.median(times) for times in passes])
    highs = np.array([max(times) for times in passes])
    factor, unit = scale_of(float(max(highs.max(), max(predicted))), TIME)
    places = np.arange(len(names))
    figure = go.Figure()
    _add_predicted(figure, names, predicted, factor)
    _add_measured(figure, names, passes, factor)
    for place, median, prediction in zip(places, medians, predicted, strict=True):
        figure.add_annotation(
            x=1,
            xref="paper",
            xanchor="left",
            align="left",
            y=place,
            text=f" {seconds(median)} measured<br> {seconds(prediction)} predicted" if prediction else "",
            showarrow=False,
        )
    longest = float(max(highs.max(), max(predicted))) / factor
    figure.update_xaxes(title=f"time of one pass, {unit}", range=[0, longest * 1.02 or 1])
    figure.update_yaxes(
        tickvals=places,
        ticktext=[plain(name) for name in names],
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
    )
    height = 130 + 52 * len(names)
    finish(figure, title, height, top=70, barmode="overlay", legend=legend_above(height))
    return figure.update_layout(margin_r=TIMES)


def _add_predicted(figure: go.Figure, names: Sequence[str], predicted: Sequence[float], factor: float) -> None:
    figure.add_bar(
        x=np.array(predicted) / factor,
        y=np.arange(len(names)) - 0.19,
        width=0.34,
        orientation="h",
        name="Predicted",
        marker={"color": faint(TEAL), "line": {"color": TEAL, "width": 1.5}},
        customdata=[
            f"{plain(name)}<br>predicted {seconds(value)}" for name, value in zip(names, predicted, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _add_measured(figure: go.Figure, names: Sequence[str], passes: Sequence[Sequence[float]], factor: float) -> None:
    medians, lows, highs = (np.array([pick(times) for times in passes]) for pick in (np.median, min, max))
    figure.add_bar(
        x=medians / factor,
        y=np.arange(len(names)) + 0.19,
        width=0.34,
        orientation="h",
        name="Measured, median pass",
        marker={"color": TEAL, "line": {"color": TEAL, "width": 1.5}},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": (highs - medians) / factor,
            "arrayminus": (medians - lows) / factor,
            "color": NEUTRAL,
            "thickness": 2,
            "width": 6,
        },
        customdata=[
            f"{plain(name)}<br>measured {seconds(median)}, passes {seconds(low)} to {seconds(high)}"
            for name, median, low, high in zip(names, medians, lows, highs, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )


def links(bandwidth: np.ndarray, drawn: np.ndarray, scale: float) -> go.Figure:
    """The emulated link of every rank. bandwidth, drawn: float64[rank], bytes/s each way."""
    rates = bandwidth * 8 / 1e6
    figure = go.Figure()
    figure.add_bar(
        x=np.arange(len(rates)),
        y=rates,
        marker={"color": TEAL},
        text=[digits(rate) for rate in rates],
        textposition="outside" if len(rates) <= 16 else "none",
        customdata=[
            f"rank {rank}: {digits(rate)} Mb/s each way<br>drawn {digits(full * 8 / 1e9)} Gb/s"
            for rank, (rate, full) in enumerate(zip(rates, drawn, strict=True))
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_xaxes(title="rank", dtick=max(1, len(rates) // 16))
    figure.update_yaxes(title="Mb/s", range=[0, rates.max() * 1.25])
    return finish(figure, f"Emulated links: as drawn, divided by {digits(scale)}", 210)
