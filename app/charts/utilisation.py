"""How much of the time GPUs compute, with each of two models alone and with both."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, TEAL, finish, plain
from engine.studies.utilisation import Utilisation
from engine.units import ratio, seconds, share


def exclusive_and_colocated(utilisations: Sequence[Utilisation]) -> go.Figure:
    """A bar each, the mean over the GPUs, and a dot for every GPU. utilisations: the models alone, then
    both colocated."""
    *alone, both = utilisations
    names = [plain(utilisation.served) for utilisation in utilisations]
    figure = go.Figure()
    figure.add_bar(
        x=[100 * utilisation.mean for utilisation in utilisations],
        y=names,
        orientation="h",
        marker={"color": [NEUTRAL] * len(alone) + [TEAL]},
        customdata=[
            f"{share(utilisation.mean)} of {seconds(utilisation.seconds)}<br>GPUs from {share(utilisation.gpu.min())} to "
            f"{share(utilisation.gpu.max())}"
            for utilisation in utilisations
        ],
        hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        showlegend=False,
    )
    figure.add_scatter(
        x=100 * np.concatenate([utilisation.gpu for utilisation in utilisations]),
        y=np.repeat(names, [len(utilisation.gpu) for utilisation in utilisations]),
        mode="markers",
        marker={"size": 7, "color": "#FFFFFF", "line": {"width": 1, "color": "#16201F"}},
        customdata=[gpu for utilisation in utilisations for gpu in range(len(utilisation.gpu))],
        hovertemplate="GPU %{customdata}: %{x:.1f} %<extra></extra>",
        showlegend=False,
    )
    most = max(float(utilisation.gpu.max()) for utilisation in utilisations)
    for name, utilisation in zip(names, utilisations, strict=True):
        figure.add_annotation(
            x=100 * utilisation.gpu.max(),
            y=name,
            text=f"mean {share(utilisation.mean)}",
            showarrow=False,
            xanchor="left",
            xshift=8,
            font={"size": 12},
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="GPU utilisation, % (compute time / total)", range=[0, 115 * most or 1])
    return finish(figure, _title([utilisation.mean for utilisation in alone], both.mean), 64 + 44 * len(names) + 60)


def _title(alone: list[float], both: float) -> str:
    if min(alone) <= 0:
        return f"Colocated, GPUs compute {share(both)} of the time"
    gains = sorted(both / mean for mean in alone)
    times = ratio(gains[0]) if ratio(gains[0]) == ratio(gains[-1]) else f"{ratio(gains[0])} to {ratio(gains[-1])}"
    return f"Colocated, GPUs compute {share(both)} of the time: {times} that of one model alone"
