"""Predictions against measurements."""

from collections.abc import Sequence

import plotly.graph_objects as go

from app.charts.theme import KIND_COLOURS, NEUTRAL, SECOND, TEAL, finish, legend_above, plain
from engine import units
from engine.studies.trust import Prediction

HEIGHT = 460
COLOURS = (TEAL, KIND_COLOURS["dispatch"], KIND_COLOURS["dense"], KIND_COLOURS["aggregate"])
SYMBOLS = ("circle", "diamond", "square", "cross")
OLD = "without knowing how tokens travel"


def predicted_measured(sections: dict[str, Sequence[Prediction]], old: Sequence[Prediction], title: str) -> go.Figure:
    """Every held-out prediction over its measurement, on a line where they are equal. sections: by what they are of; old: of
    the pricing that knows neither rows nor efficiency"""
    figure = go.Figure()
    shown = {**sections, OLD: old}
    points = [prediction for part in shown.values() for prediction in part]
    ends = [min(point.measured for point in points), max(point.measured for point in points)]
    figure.add_scatter(
        x=[1e3 * end for end in ends],
        y=[1e3 * end for end in ends],
        mode="lines",
        name="equal",
        line={"color": NEUTRAL, "width": 1, "dash": "dash"},
        hoverinfo="skip",
    )
    for place, (name, part) in enumerate(shown.items()):
        figure.add_scatter(
            x=[1e3 * point.measured for point in part],
            y=[1e3 * point.predicted for point in part],
            mode="markers",
            name=name,
            marker={
                "symbol": "x-thin-open" if name == OLD else SYMBOLS[place % len(SYMBOLS)],
                "color": SECOND if name == OLD else COLOURS[place % len(COLOURS)],
                "size": 7,
            },
            text=[_hover(point) for point in part],
            hovertemplate="%{text}<extra></extra>",
        )
    figure.update_xaxes(type="log", title="Measured, ms", dtick=1, tickformat="~g")
    figure.update_yaxes(type="log", title="Predicted, ms", dtick=1, tickformat="~g")
    return finish(figure, title, HEIGHT, top=64, legend=legend_above(HEIGHT))


def _hover(point: Prediction) -> str:
    nodes = f"{point.nodes} node{'s' if point.nodes > 1 else ''}"
    return (
        f"<b>{plain(point.of)}</b><br>{point.hardware}, {nodes}, {point.setting}<br>measured {units.seconds(point.measured)}, "
        f"predicted {units.seconds(point.predicted)} ({point.error:+.0%})"
    )
