"""Charts of a recording: the load of every expert, the traffic between GPUs, and the gain of planning the sample."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.charts.theme import MARK, NEUTRAL, SEQUENTIAL, TEAL, finish, plain
from engine.units import SIZE, digits, ratio, scale_of, seconds, signed, size

SMALL_MULTIPLES = 32
"""Layers shown as bars; more become rows of a heatmap."""
FEW = 8
"""Most bars that are all numbered; with more, only halves between them are."""


def popularity(load: np.ndarray, of: str = "expert") -> go.Figure:
    """Token copies per expert, one small bar chart for each layer on a shared axis.

    load: float64[layer, expert]
    of: meaning of a column, a GPU in a traffic matrix
    """
    layers, experts = load.shape
    mean = load.mean(axis=1)
    skew = np.divide(load.max(axis=1), mean, out=np.ones(layers), where=mean > 0)
    worst = int(skew.argmax())
    title = f"Layer {worst} is the most skewed: its busiest {of} gets {ratio(skew[worst])} the mean"
    if layers == 1:
        title = f"The busiest {of} gets {ratio(skew[worst])} the mean"
    if layers > SMALL_MULTIPLES:
        return _popularity_map(load, of, title)
    columns = min(4, layers)
    rows = -(-layers // columns)
    wide, high = 0.02, min(0.09, 0.5 / rows)  # between bar charts, and between rows of them
    width, height = (1 - wide * (columns - 1)) / columns, (1 - high * (rows - 1)) / rows
    bars, means, titles, axes = [], [], [], {}
    # Dictionaries, not `make_subplots`, which looks through all axes for every single one.
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        left, bottom = column * (width + wide), (rows - 1 - row) * (height + high)
        own, lowest, first = (str(at + 1) if at else "" for at in (place, (rows - 1) * columns + column, (rows - 1) * columns))
        across = {"anchor": f"y{own}", "domain": [left, min(left + width, 1)], "dtick": 1 if experts <= FEW else None}
        upright = {"anchor": f"x{own}", "domain": [bottom, min(bottom + height, 1)]}
        across |= {"title": of} if own == lowest else {"matches": f"x{lowest}", "showticklabels": False}
        upright |= {} if own == first else {"matches": f"y{first}"}
        upright |= {"showticklabels": False} if column else {"title": "token copies", "nticks": 4}
        axes |= {f"xaxis{own}": across, f"yaxis{own}": upright}
        if place >= layers:
            continue
        drawn = {
            "type": "bar",
            "x": np.arange(experts),
            "y": load[place],
            "xaxis": f"x{own}",
            "yaxis": f"y{own}",
            "marker": {"color": np.where(load[place] == load[place].max(), MARK, TEAL), "line": {"width": 0}},
            "showlegend": False,
            "hovertemplate": f"layer {place}, {of} %{{x}}: %{{y:,.0f}} copies<extra></extra>",
        }
        bars.append(drawn)
        line = {"dash": "dot", "width": 1, "color": NEUTRAL}
        ends = {"xref": f"x{own} domain", "x0": 0, "x1": 1, "yref": f"y{own}", "y0": mean[place], "y1": mean[place]}
        means.append({"type": "line", "line": line} | ends)
        top = {"x": left + width / 2, "xanchor": "center", "y": bottom + height, "yanchor": "bottom"}
        said = {"text": f"Layer {place} · {ratio(skew[place])}", "font": {"size": 12}, "showarrow": False}
        titles.append(said | top | {"xref": "paper", "yref": "paper"})
    figure = go.Figure(bars, axes)
    return finish(figure, title, 130 * rows + 110, bargap=0.15, shapes=means, annotations=titles)


def _popularity_map(load: np.ndarray, of: str, title: str) -> go.Figure:
    """Token copies per expert (across) and layer (down); of: as for `popularity`."""
    colorbar = {"title": "token copies", "thickness": 12}
    hovertemplate = f"layer %{{y}}, {of} %{{x}}: %{{z:,.0f}} copies<extra></extra>"
    figure = go.Figure().add_heatmap(
        z=load, colorscale=SEQUENTIAL, zmin=0, zmax=load.max() or 1, colorbar=colorbar, hovertemplate=hovertemplate
    )
    figure.update_xaxes(title=of, showgrid=False)
    figure.update_yaxes(title="MoE layer", autorange="reversed", showgrid=False)
    return finish(figure, title, 640)


def traffic(matrix: np.ndarray, names: tuple[str, ...]) -> go.Figure:
    """Bytes from GPU to GPU, with the sums that every GPU sends and receives at the sides and the busiest one marked.

    matrix: float64[src, dst] bytes; the diagonal is local work and left empty
    """
    n = len(matrix)
    off = np.where(np.eye(n, dtype=bool), 0.0, matrix)
    sends, receives = off.sum(axis=1), off.sum(axis=0)
    factor, unit = scale_of(max(sends.max(), receives.max()), SIZE)
    shown = np.where(np.eye(n, dtype=bool), np.nan, matrix) / factor
    names = tuple(plain(name) for name in names)
    short = [name.split(" · ")[0] for name in names]
    figure = make_subplots(
        2,
        2,
        column_widths=[0.8, 0.2],
        row_heights=[0.2, 0.8],
        horizontal_spacing=0.02,
        vertical_spacing=0.03,
        shared_xaxes=True,
        shared_yaxes=True,
    )
    hover = [[f"{names[i]} → {names[j]}: {size(matrix[i, j])}" for j in range(n)] for i in range(n)]
    figure.add_heatmap(
        z=shown,
        x=short,
        y=short,
        colorscale=SEQUENTIAL,
        zmin=0,
        zmax=off.max() / factor or 1,
        text=hover,
        hovertemplate="%{text}<extra></extra>",
        colorbar={"title": unit, "len": 0.75, "y": 0.37},
        row=2,
        col=1,
    )
    receiving = receives.max() >= sends.max()
    worst = int((receives if receiving else sends).argmax())
    for values, row, col, marked in ((receives, 1, 1, receiving), (sends, 2, 2, not receiving)):
        _add_sums(figure, values, short, factor, row, col, worst if marked else None)
    edge = {"line": {"color": MARK, "width": 3}, "fillcolor": "rgba(0,0,0,0)"}
    if receiving:
        figure.add_shape(type="rect", x0=worst - 0.5, x1=worst + 0.5, y0=-0.5, y1=n - 0.5, row=2, col=1, **edge)
    else:
        figure.add_shape(type="rect", y0=worst - 0.5, y1=worst + 0.5, x0=-0.5, x1=n - 0.5, row=2, col=1, **edge)
    figure.update_yaxes(autorange="reversed", title="source", row=2, col=1)
    figure.update_yaxes(autorange="reversed", row=2, col=2)
    figure.update_xaxes(title="destination", row=2, col=1)
    figure.update_yaxes(title=f"receives, {unit}", row=1, col=1)
    figure.update_xaxes(title=f"sends, {unit}", row=2, col=2)
    mean = (receives if receiving else sends).mean()
    times = ratio((receives if receiving else sends).max() / mean) if mean else "0×"
    verb = "receives" if receiving else "sends"
    title = f"{short[worst]} {verb} {times} the mean; {digits(off.sum() / factor)} {unit} leave their GPU"
    return finish(figure, title, 560, bargap=0.25)


def _add_sums(
    figure: go.Figure, values: np.ndarray, names: list[str], factor: float, row: int, col: int, worst: int | None
) -> None:
    """Bars at the sides of the matrix: upright above it, else across. values: bytes per GPU; worst: the GPU that is marked."""
    colours = [MARK if gpu == worst else TEAL for gpu in range(len(values))]
    across = {"x": names, "y": values / factor} if row == 1 else {"x": values / factor, "y": names, "orientation": "h"}
    figure.add_bar(
        **across,
        marker_color=colours,
        showlegend=False,
        row=row,
        col=col,
        text=[size(value) for value in values],
        textposition="none",
        hovertemplate="%{text}<extra></extra>",
    )


BEFORE = "Experts in order,<br>all sends at once"
HEIGHT = 220


def gain(before: float, after: float, bound: float, system: str) -> go.Figure:
    """Seconds of a pass as deployed and as planned by a system, and the bound of any plan."""
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
    annotation = {
        "text": f"proven bound {seconds(bound)}",
        "font": {"size": 12},
        "xanchor": "right" if bound > before / 2 else "left",
        "yanchor": "bottom",
    }
    figure.add_vline(
        bound, line={"color": NEUTRAL, "width": 2, "dash": "dash"}, annotation=annotation, annotation_position="top"
    )
    figure.update_xaxes(visible=False, range=[0, before * 1.02])
    figure.update_yaxes(autorange="reversed", tickfont={"size": 13})
    title = f"The sample on eight mixed GPUs: {signed(before / after - 1)} speed by planning (simulated, in sample)"
    return finish(figure, title, HEIGHT, top=70, bargap=0.35)
