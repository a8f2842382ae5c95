"""Charts of a launch: measured times next to predicted ones, and the links of a testbed."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import KIND_COLOURS, KIND_TITLES, MUTED, NEUTRAL, SMALLEST, TEAL, faint, finish, legend_above, plain, tips
from engine.launch.results.comparison import furthest
from engine.units import TIME, digits, ratio, scale_of, seconds, share

TIMES = 136
"""Pixels at the right of bars, of their times in words."""
HEIGHT = 340
PAIR, AROUND = 40, 136
"""Pixels of a pair of bars with its two times, and of the rest of such a chart."""
WRITTEN = 8
"""Most pairs of bars that have room for their times."""
WAITING = "Waiting between steps"
OUTSIDE = "Outside the layers"
"""Embedding, head, all-reduces and the update of a training step, whose layer is -1."""


def by_kind(
    kinds: Sequence[str],
    predicted: Sequence[float],
    measured: Sequence[float],
    total: tuple[float, float],
    waiting: tuple[float, float],
    dark: bool = False,
) -> go.Figure:
    """Bars for each step, and for the time in which nothing runs: predicted outlined, measured solid.

    predicted, measured: seconds
    total, waiting: (predicted, measured)
    dark: the page's theme
    """
    order = sorted(range(len(kinds)), key=lambda at: list(KIND_TITLES).index(kinds[at]))
    kinds, predicted, measured = ([column[at] for at in order] for column in (kinds, predicted, measured))
    names = [*(KIND_TITLES[kind] for kind in kinds), WAITING]
    colours = [*(KIND_COLOURS[kind] for kind in kinds), NEUTRAL]
    before, after = waiting
    figure = _lying(names, [*predicted, before], [*measured, after], colours, dark)
    worst = furthest(names, [*predicted, before], [*measured, after])
    title = against_prediction(*total) + (f"; {worst}" if worst else "")
    return _with_legend(figure, title, len(names))


def against_prediction(predicted: float, measured: float) -> str:
    """`The run took 1.1 % less time than predicted`."""
    off = measured / predicted - 1
    if abs(off) < 0.0005:
        return "The run took the predicted time"
    if off >= 1:
        return f"The run took {ratio(1 + off)} the predicted time"
    return f"The run took {share(abs(off))} {'more' if off > 0 else 'less'} time than predicted"


def by_layer(layers: Sequence[int], predicted: Sequence[float], measured: Sequence[float], dark: bool = False) -> go.Figure:
    """Bars for each MoE layer: predicted outlined, measured solid, in seconds. Many layers stand upright, predicted
    left of measured, with their times in tips."""
    names = [OUTSIDE if layer < 0 else f"Layer {layer}" for layer in layers]
    factors = {name: after / before for name, before, after in zip(names, predicted, measured, strict=True) if before}
    title = "Seconds of every layer"
    if factors:
        worst = max(factors, key=lambda name: abs(np.log(max(factors[name], 1e-9))))
        title = f"{worst} is furthest from its prediction: {ratio(factors[worst])}"
    colours = [TEAL] * len(layers)
    if len(names) <= WRITTEN:
        return _with_legend(_lying(names, predicted, measured, colours, dark), title, len(names))
    most = max([*predicted, *measured], default=0.0)
    factor, unit = scale_of(most, TIME)
    figure = go.Figure()
    for values, look in _both(names, predicted, measured, colours):
        figure.add_bar(x=list(layers), y=[value / factor for value in values], **look)
    marked = [layer for place, layer in enumerate(layers) if layer < 0 or place % max(1, len(layers) // 16) == 0]
    labels = ["outside" if layer < 0 else f"{layer}" for layer in marked]
    figure.update_xaxes(title="MoE layer" if min(layers) >= 0 else "layer", tickvals=marked, ticktext=labels)
    figure.update_yaxes(title=f"time, {unit}", range=[0, most / factor * 1.05 or 1])
    return _with_legend(figure, title)


def _with_legend(figure: go.Figure, title: str, pairs: int | None = None) -> go.Figure:
    """Finish a figure with its legend. pairs: number of horizontal pairs, which set the height; None: the bars are upright."""
    height = HEIGHT if pairs is None else AROUND + PAIR * pairs
    return finish(figure, title, height, top=70, bargap=0.2, legend=legend_above(height))


def _lying(
    names: Sequence[str], predicted: Sequence[float], measured: Sequence[float], colours: Sequence[str], dark: bool
) -> go.Figure:
    """Horizontal pairs of bars, predicted above measured, each with its time behind its end."""
    most = max([*predicted, *measured], default=0.0)
    factor, unit = scale_of(most, TIME)
    figure = go.Figure()
    for values, look in _both(names, predicted, measured, colours):
        figure.add_bar(
            x=[value / factor for value in values],
            y=list(names),
            orientation="h",
            text=[seconds(value) for value in values],
            textposition="outside",
            textfont={"size": SMALLEST, "color": MUTED[dark]},
            textangle=0,
            constraintext="none",
            cliponaxis=False,
            **look,
        )
    # The longest bar leaves room for its time.
    figure.update_xaxes(title=f"time, {unit}", range=[0, most / factor * 1.4 or 1])
    return figure.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=6)


def _both(
    names: Sequence[str], predicted: Sequence[float], measured: Sequence[float], colours: Sequence[str]
) -> Iterator[tuple[Sequence[float], dict[str, Any]]]:
    """Seconds and look of either kind of bars: outlined and solid, each with its time in its tip."""
    for label, values, fills in (
        ("Predicted", predicted, [faint(colour) for colour in colours]),
        ("Measured", measured, list(colours)),
    ):
        marker = {"color": fills, "line": {"color": list(colours), "width": 1.5}}
        texts = (f"{name}, {label.lower()}: {seconds(value)}" for name, value in zip(names, values, strict=True))
        yield values, {"name": label, "offsetgroup": label, "marker": marker, **tips(texts)}


def totals(names: Sequence[str], predicted: Sequence[float], passes: Sequence[Sequence[float]], title: str) -> go.Figure:
    """Predicted time of every plan, outlined, and the median of its timed passes, solid, with whiskers from the fastest to the
    slowest pass. Seconds."""
    medians = np.array([np.median(times) for times in passes])
    highs = np.array([max(times) for times in passes])
    factor, unit = scale_of(float(max(highs.max(), max(predicted))), TIME)
    places = np.arange(len(names))
    figure = go.Figure()
    outlined, lows = {"color": TEAL, "width": 1.5}, np.array([min(times) for times in passes])
    figure.add_bar(
        x=np.array(predicted) / factor,
        y=places - 0.19,
        width=0.34,
        orientation="h",
        name="Predicted",
        marker={"color": faint(TEAL), "line": outlined},
        **tips(f"{plain(name)}<br>predicted {seconds(value)}" for name, value in zip(names, predicted, strict=True)),
    )
    figure.add_bar(
        x=medians / factor,
        y=places + 0.19,
        width=0.34,
        orientation="h",
        name="Measured, median pass",
        marker={"color": TEAL, "line": outlined},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": (highs - medians) / factor,
            "arrayminus": (medians - lows) / factor,
            "color": NEUTRAL,
            "thickness": 2,
            "width": 6,
        },
        **tips(
            f"{plain(name)}<br>measured {seconds(median)}, passes {seconds(low)} to {seconds(high)}"
            for name, median, low, high in zip(names, medians, lows, highs, strict=True)
        ),
    )
    for place, median, prediction in zip(places, medians, predicted, strict=True):
        text = f" {seconds(prediction)} predicted<br> {seconds(median)} measured" if prediction else ""
        figure.add_annotation(x=1, xref="paper", xanchor="left", align="left", y=place, text=text, showarrow=False)
    longest = float(max(highs.max(), max(predicted))) / factor
    figure.update_xaxes(title=f"time of one pass, {unit}", range=[0, longest * 1.02 or 1])
    ticktext = [plain(name) for name in names]
    range = [len(names) - 0.5, -0.5]
    figure.update_yaxes(tickvals=places, ticktext=ticktext, range=range, showgrid=False, zeroline=False)
    height = 130 + 52 * len(names)
    layout = {"barmode": "overlay", "legend": legend_above(height), "margin": {"r": TIMES}}
    return finish(figure, title, height, top=70, **layout)


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
        **tips(
            f"rank {rank}: {digits(rate)} Mb/s each way<br>drawn {digits(full * 8 / 1e9)} Gb/s"
            for rank, (rate, full) in enumerate(zip(rates, drawn, strict=True))
        ),
    )
    figure.update_xaxes(title="rank", dtick=max(1, len(rates) // 16))
    figure.update_yaxes(title="Mb/s", range=[0, rates.max() * 1.25])
    return finish(figure, f"Emulated links: as drawn, divided by {digits(scale)}", 210)
