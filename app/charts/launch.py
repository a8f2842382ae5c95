"""Measured beside predicted."""

import plotly.graph_objects as go

from app.charts.theme import KIND_COLOURS, KIND_TITLES, finish
from engine.units import TIME, ratio, scale_of, seconds


def by_kind(kinds: list[str], predicted: list[float], measured: list[float], total: tuple[float, float]) -> go.Figure:
    """Bars per step: predicted outlined, measured solid. Times in seconds; total: (predicted, measured)."""
    factor, unit = scale_of(max([*predicted, *measured]), TIME)
    names = [KIND_TITLES[kind] for kind in kinds]
    colours = [KIND_COLOURS[kind] for kind in kinds]
    figure = go.Figure()
    for label, values, opacity in (("predicted", predicted, 0.35), ("measured", measured, 1.0)):
        figure.add_bar(
            x=names, y=[value / factor for value in values], name=label, offsetgroup=label,
            marker={"color": colours, "opacity": opacity, "line": {"color": colours, "width": 1.5}},
            text=[seconds(value) for value in values], textposition="outside",
            hovertemplate=f"%{{x}}, {label}: %{{text}}<extra></extra>", showlegend=False,
        )  # fmt: skip
    figure.update_yaxes(title=f"time, {unit}", range=[0, max([*predicted, *measured]) / factor * 1.18])
    title = f"The run took {ratio(total[1] / total[0])} the predicted time (left bars predicted, right bars measured)"
    return finish(figure, title, 360, bargap=0.3)
