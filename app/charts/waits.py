"""Who finishes last: the time of a forward pass by the GPU that all wait for, and by layer."""

from itertools import product

import pandas as pd
import plotly.graph_objects as go

from app.charts.gantt import SECOND
from app.charts.theme import KIND_COLOURS, KIND_TITLES, MARK, SMALLEST, finish, legend_above, plain
from engine.timeline import KINDS
from engine.units import TIME, scale_of, seconds, share

MOST = 24
"""GPUs and layers that are drawn, those that are waited for longest."""
EVEN = 1.02
"""Times the mean: a slowest layer below it is not worth a finding."""


def by_gpu(waits: pd.DataFrame, names: tuple[str, ...]) -> go.Figure:
    """Stacked bars of seconds by kind, one a GPU that anybody waited for; their colours are named by the chart by layer, which
    stands beside it. waits: as `engine.simulate.waits`; names: of every GPU."""
    times = waits.groupby("gpu")["seconds"].sum().sort_values(ascending=False)
    worst, whole = int(times.index[0]), times.sum() or 1.0
    title = f"{plain(names[worst])} finishes last for {share(times.iloc[0] / whole)} of the time"
    if len(times) > MOST:
        title += f" (the {MOST} longest of {len(times)} GPUs that others wait for)"
    figure = _bars(waits, "gpu", {int(gpu): plain(names[gpu]) for gpu in times.index[:MOST]}, worst, title, "")
    return figure.update_layout(showlegend=False)


def by_layer(waits: pd.DataFrame) -> go.Figure:
    """The same by MoE layer, in their order."""
    times = waits.groupby("layer")["seconds"].sum()
    worst, mean = int(times.idxmax()), times.mean() or 1.0
    longest = times.sort_values(ascending=False).index[:MOST]
    above = times[worst] / mean
    title = f"Layer {worst} is slowest: {seconds(times[worst])}, {above:.2f}× mean"
    if above < EVEN:
        title = f"All layers take about as long: {seconds(mean)}"
    if len(times) > MOST:
        title += f" (the {MOST} slowest of {len(times)})"
    names = {int(layer): f"layer {layer}" for layer in sorted(longest)}
    return _bars(waits, "layer", names, worst, title, "MoE layer")


def _bars(waits: pd.DataFrame, by: str, names: dict[int, str], worst: int, title: str, axis: str) -> go.Figure:
    shown = waits[waits[by].isin(names)]
    factor, unit = scale_of(float(shown.groupby(by)["seconds"].sum().max()), TIME)
    times = shown.pivot_table("seconds", ["model", "kind"], by, "sum", fill_value=0.0)[list(names)]
    traces = []
    for model, kind in product((0, 1), KINDS):
        if (model, kind) not in times.index:
            continue
        name, own = KIND_TITLES[kind] + SECOND * model, times.loc[model, kind].to_numpy()
        traces.append(
            {
                "type": "bar",
                "x": own / factor,
                "y": list(names.values()),
                "orientation": "h",
                "name": name,
                "marker": {
                    "color": KIND_COLOURS[kind],
                    "pattern": {"shape": "/" if model else "", "size": 6, "solidity": 0.35},
                },
                "customdata": [seconds(time) for time in own],
                "hovertemplate": f"%{{y}}<br>{name}<br>%{{customdata}}<extra></extra>",
            }
        )
    figure = go.Figure(traces)
    figure.add_annotation(
        x=shown.loc[shown[by] == worst, "seconds"].sum() / factor,
        y=names[worst],
        text=f'<span style="color: {MARK}">◀</span> longest',
        showarrow=False,
        xanchor="left",
        font={"size": SMALLEST},
    )
    figure.update_yaxes(autorange="reversed", title=axis)
    figure.update_xaxes(title=f"time others wait, {unit}", rangemode="tozero")
    height = 24 * len(names) + 150
    return finish(figure, title, height, top=72, barmode="stack", bargap=0.25, legend=legend_above(height))
