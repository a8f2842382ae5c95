"""Charts of trust: predictions against measurements, and measured pairs of GPUs against the cluster."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.charts import theme
from engine import units
from engine.cluster import Cluster
from engine.compare.trust import Prediction
from engine.costs.pair_cluster import CLOSE, PairCluster
from engine.units import bandwidth, digits, share, signed

HEIGHT = 460
COLOURS = (theme.TEAL, theme.KIND_COLOURS["dispatch"], theme.KIND_COLOURS["dense"], theme.KIND_COLOURS["aggregate"])
SYMBOLS = ("circle", "diamond", "square", "cross", "triangle-up")
OLD = "without knowing how tokens travel"


def predicted_measured(sections: dict[str, Sequence[Prediction]], old: Sequence[Prediction], title: str) -> go.Figure:
    """Every held-out prediction over its measurement, with a line at equality.

    sections: by title
    old: predictions of the pricing that knows neither rows nor efficiency
    """
    figure = go.Figure()
    shown = {**sections, OLD: old}
    points = [prediction for part in shown.values() for prediction in part]
    ends = [min(point.measured for point in points), max(point.measured for point in points)]
    x = [1e3 * end for end in ends]
    y = [1e3 * end for end in ends]
    figure.add_scatter(
        x=x, y=y, mode="lines", name="equal", line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"}, hoverinfo="skip"
    )
    for place, (name, part) in enumerate(shown.items()):
        figure.add_scatter(
            x=[1e3 * point.measured for point in part],
            y=[1e3 * point.predicted for point in part],
            mode="markers",
            name=name,
            marker={
                "symbol": "x-thin-open" if name == OLD else SYMBOLS[place % len(SYMBOLS)],
                "color": theme.SECOND if name == OLD else COLOURS[place % len(COLOURS)],
                "size": 7,
            },
            text=[_hover(point) for point in part],
            hovertemplate="%{text}<extra></extra>",
        )
    figure.update_xaxes(type="log", title="Measured, ms", dtick=1, tickformat="~g")
    figure.update_yaxes(type="log", title="Predicted, ms", dtick=1, tickformat="~g")
    return theme.finish(figure, title, HEIGHT, top=64, legend=theme.legend_above(HEIGHT))


def _hover(point: Prediction) -> str:
    nodes = f"{point.nodes} node{'s' if point.nodes > 1 else ''}"
    return (
        f"<b>{theme.plain(point.of)}</b><br>{point.hardware}, {nodes}, {point.setting}<br>measured "
        f"{units.seconds(point.measured)}, predicted {units.seconds(point.predicted)} ({point.error:+.0%})"
    )


MOST_GPUS = 512
"""Most GPUs with drawn matrices: a browser is sent some 8 MB for them."""
NUMBERED_GPUS, NAMED_GPUS, LABELLED_GPUS = 6, 32, 16
"""Most GPUs for numbers in the cells, for hosts and buses in tips, and for a label of every row and column."""
LINED_NODES, CROSSED_GPUS = 64, 64
"""Most GPUs for lines between nodes, and for crosses at pairs that were not measured."""
PLOTS = ("Measured, Gb/s", "Drawn, Gb/s", "Drawn slower (−) or faster (+), %")
BARS_Y = -0.26
NARROW = 0.1
"""Least range of the logarithm of rates, so that nearly equal pairs look equal."""
WIDEST = 1.0
"""Relative difference at which the colours end: rates drawn twice as fast look like any faster one."""


def pair_rates(pairs: PairCluster, dark: bool) -> go.Figure:
    """Three matrices: rates of pairs as measured, as the cluster has them (darker where faster, logarithmic), and the relative
    difference, none at its middle. Crossed out or empty if a pair was not measured; the title names the worst."""
    figure = make_subplots(1, 3, shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=PLOTS)
    rate_scale = _scale_of_rates(pairs)
    widest = float(np.clip(np.nanmax(np.abs(pairs.difference)), CLOSE, WIDEST))
    scales = [
        *(rate_scale | {"z": np.log10(rate)} for rate in (pairs.measured, pairs.drawn)),
        {"z": pairs.difference, "zmin": -widest, "zmax": widest, "colorscale": theme.DIVERGING},
    ]
    for column, scale in enumerate(scales, start=1):
        figure.add_trace(_matrix(pairs, scale, column), row=1, col=column)
        _mark_unmeasured(figure, pairs, column)
        _draw_nodes(figure, pairs.cluster, column)
        if len(pairs.names) <= NUMBERED_GPUS:
            theme.write_numbers(figure, scale, _numbers(pairs, column), dark, row=1, col=column)
    _label(figure, pairs.cluster)
    figure.update_annotations(font_size=13)
    return theme.finish(figure, _title(pairs), 450, top=70)


def _scale_of_rates(pairs: PairCluster) -> dict:
    """One scale for measured and drawn: the slowest is a third up the colours, so that it is not taken for an empty cell."""
    both = np.log10([pairs.measured, pairs.drawn])
    low, high = float(np.nanmin(both)), float(np.nanmax(both))
    return {"zmin": low - max(high - low, NARROW) / 2, "zmax": max(high, low + NARROW), "colorscale": theme.SEQUENTIAL}


def _matrix(pairs: PairCluster, scale: dict, column: int) -> go.Heatmap:
    """One of the three, as float32, which halves the bytes sent to the browser. column: its place, from 1."""
    gpus = len(pairs.names)
    values = (pairs.measured * 8e-9, pairs.drawn * 8e-9, pairs.difference * 100)[column - 1]
    unit = "%{customdata:+.4~r} %" if column == 3 else "%{customdata:,.5~r} Gb/s"
    names = [theme.plain(f"GPU {place} · {name}") for place, name in enumerate(pairs.names)]
    named = gpus <= NAMED_GPUS
    return go.Heatmap(
        **scale | {"z": scale["z"].astype(np.float32)},
        customdata=values.astype(np.float32),
        text=[[f"{first}<br>{second}" for second in names] for first in names] if named else None,
        hovertemplate=f"{'%{text}' if named else 'GPU %{y} with GPU %{x}'}<br>{unit}<extra></extra>",
        hoverongaps=False,
        xgap=gpus <= 64,
        ygap=gpus <= 64,
        showscale=column != 2,
        colorbar=_colour_bar(scale, column),
    )


def _colour_bar(scale: dict, column: int) -> dict:
    """A colour bar below the matrices: that of the rates belongs to the first two of them."""
    low, high = scale["zmin"], scale["zmax"]
    bar = {"orientation": "h", "y": BARS_Y, "yanchor": "top", "thickness": 8, "outlinewidth": 0}
    if column == 3:
        ticks = np.array([low, 0.0, high])
        return bar | {"x": 0.84, "len": 0.26, "tickvals": ticks, "ticktext": [signed(low), "0", signed(high)]}
    ticks = np.linspace(low + (high - low) / 3, high, 3)
    return bar | {"x": 0.325, "len": 0.5, "tickvals": ticks, "ticktext": [bandwidth(10**tick) for tick in ticks]}


def _numbers(pairs: PairCluster, column: int) -> list[list[str]]:
    if column == 3:
        percents = [[None if np.isnan(cell) else round(100 * cell) for cell in row] for row in pairs.difference]
        return [["" if cell is None else f"{cell:+d}".replace("-", "−").replace("+0", "0") for cell in row] for row in percents]
    rates = pairs.measured if column == 1 else pairs.drawn
    return [["" if np.isnan(rate) else digits(rate * 8e-9).replace(",", "") for rate in row] for row in rates]


def _mark_unmeasured(figure: go.Figure, pairs: PairCluster, column: int) -> None:
    first, second = np.nonzero(np.isnan(pairs.measured) & ~np.eye(len(pairs.names), dtype=bool))
    if len(first) and len(pairs.names) <= CROSSED_GPUS:
        size = float(np.clip(100 / len(pairs.names), 1, 6))
        marker = {"symbol": "x-thin", "size": size, "opacity": 0.6, "line": {"color": theme.NEUTRAL, "width": 1}}
        figure.add_scatter(
            x=second, y=first, mode="markers", marker=marker, hoverinfo="skip", showlegend=False, row=1, col=column
        )


def _draw_nodes(figure: go.Figure, cluster: Cluster, column: int) -> None:
    """Draw lines between nodes as one trace: plotly takes a second for some ten shapes."""
    if not 1 < len(cluster.nodes) <= LINED_NODES:
        return
    ends = np.cumsum([len(node.gpus) for node in cluster.nodes])[:-1] - 0.5
    places = [place for end in ends for place in (end, end, None)]
    across = [-0.5, len(cluster.gpus) - 0.5, None] * len(ends)
    line = {"color": theme.NEUTRAL, "width": 1}
    figure.add_scatter(
        x=places + across, y=across + places, mode="lines", line=line, hoverinfo="skip", showlegend=False, row=1, col=column
    )


def _label(figure: go.Figure, cluster: Cluster) -> None:
    """Label GPUs by their numbers, as on the board; of many, only the first of each node."""
    gpus = len(cluster.gpus)
    firsts = np.cumsum([0, *(len(node.gpus) for node in cluster.nodes)])[:-1]
    places = np.arange(gpus) if gpus <= LABELLED_GPUS else firsts[:: -(-len(firsts) // LABELLED_GPUS)]
    common = {"tickvals": places, "ticktext": places, "showgrid": False, "zeroline": False}
    figure.update_xaxes(**common, range=[-0.5, gpus - 0.5])
    figure.update_yaxes(**common, range=[gpus - 0.5, -0.5])
    figure.update_xaxes(title={"text": "GPU", "standoff": 10})
    figure.update_yaxes(title="GPU", col=1)


def _title(pairs: PairCluster) -> str:
    off = int((np.triu(np.abs(pairs.difference)) > CLOSE).sum())
    count = int(np.isfinite(pairs.measured).sum()) // 2
    if not off:
        most = float(np.nanmax(np.abs(pairs.difference)))
        return f"All {count} measured pairs are met within {share(max(most, 0.001))}"
    first, second = pairs.worst(1)[0]
    measured, drawn = (bandwidth(matrix[first, second]) for matrix in (pairs.measured, pairs.drawn))
    return (
        f"{off} of {count} pairs {'is' if off == 1 else 'are'} more than {share(CLOSE)} off, GPU {first} with GPU {second} "
        f"most: {measured} measured, {drawn} drawn"
    )
