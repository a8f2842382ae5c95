"""What planning the sample gains."""

import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, TEAL, finish
from engine.units import ratio, seconds

BEFORE = "Experts in order,<br>all sends at once"
HEIGHT = 220


def gain(before: float, after: float, bound: float, system: str) -> go.Figure:
    """Seconds of a pass as deployed and as planned by a system, and what no plan can beat."""
    figure = go.Figure()
    for name, time, colour in ((BEFORE, before, NEUTRAL), (f"Planned by<br>{system}", after, TEAL)):
        figure.add_bar(
            y=[name],
            x=[time],
            orientation="h",
            marker_color=colour,
            text=[seconds(time)],
            textposition="inside",
            insidetextanchor="end",
            insidetextfont={"color": "#FFFFFF" if colour == TEAL else "#0D1716", "size": 15},
            hoverinfo="skip",
            showlegend=False,
        )
    figure.add_vline(
        bound,
        line={"color": NEUTRAL, "width": 2, "dash": "dash"},
        annotation={
            "text": f"proven bound {seconds(bound)}",
            "font": {"size": 12},
            "xanchor": "right" if bound > before / 2 else "left",
            "yanchor": "bottom",
        },
        annotation_position="top",
    )
    figure.update_xaxes(visible=False, range=[0, before * 1.02])
    figure.update_yaxes(autorange="reversed", tickfont={"size": 13})
    title = f"The sample on eight mixed GPUs: {ratio(before / after)} as fast (simulated)"
    return finish(figure, title, HEIGHT, top=70, bargap=0.35)
