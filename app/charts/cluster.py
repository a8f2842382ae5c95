"""Pictures of a cluster: its nodes around one fabric, the speeds between nodes, and the use of its GPUs by two models."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, SEQUENTIAL, SMALLEST, TEAL, finish, gpu_colour, plain, write_numbers
from engine.cluster import Cluster, Node
from engine.compare.contention import Utilisation
from engine.units import bandwidth, digits, ratio, seconds, share, size

GPUS_ACROSS = 4
NODES_ACROSS = 4
FABRIC_Y = -0.9
NUMBERED_NODES, NAMED_NODES = 10, 24
"""Most nodes for numbers in the cells of the matrix of speeds, and for names at its sides."""


def picture(cluster: Cluster) -> go.Figure:
    """Nodes as boxes, GPUs as squares in the colour of their type, lines to the fabric as thick as their bandwidth."""
    figure, grid = go.Figure(), _Grid.of(cluster)
    fastest, slowest = (pick(gpu.send_bandwidth for gpu in cluster.gpus) for pick in (max, min))
    # All shapes and notes at once: for every single one plotly looks through those before it.
    parts = [_fabric(grid, cluster.latency)]
    parts += [_node(grid, node, index, fastest) for index, node in enumerate(cluster.nodes)]
    _draw_gpus(figure, grid, cluster)
    title = f"{len(cluster.gpus)} GPUs in {len(cluster.nodes)} nodes"
    title += f": the fastest port is {fastest / slowest:.3g}× the slowest" if fastest > slowest else ", all ports equal"
    layout = {
        "xaxis": {"visible": False, "range": [-0.5, grid.across * grid.step_x - 0.3]},
        "yaxis": {"visible": False, "range": [FABRIC_Y - 0.5, grid.rows * grid.step_y]},
        "shapes": [shape for shapes, _ in parts for shape in shapes],
        "annotations": [note for _, notes in parts for note in notes],
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
    }
    return finish(figure, title, int(min(900, 120 + 62 * grid.rows * grid.step_y)), dragmode="pan", **layout)


@dataclass(frozen=True)
class _Grid:
    """Grid of nodes: `across` in a row, each with room for `widest` GPUs across and `deepest` down."""

    across: int
    rows: int
    widest: int
    deepest: int

    @classmethod
    def of(cls, cluster: Cluster) -> "_Grid":
        across = min(NODES_ACROSS, len(cluster.nodes))
        return cls(
            across,
            -(-len(cluster.nodes) // across),
            min(GPUS_ACROSS, max(len(node.gpus) for node in cluster.nodes)),
            max(-(-len(node.gpus) // GPUS_ACROSS) for node in cluster.nodes),
        )

    @property
    def step_x(self) -> float:
        return self.widest + 0.8

    @property
    def step_y(self) -> float:
        return self.deepest + 1.6

    def corner(self, index: int) -> tuple[float, float]:
        """Left and lower end of a node by its place in the cluster."""
        return index % self.across * self.step_x, index // self.across * self.step_y


Drawn = tuple[list[dict], list[dict]]
"""Shapes, and notes at them."""


def _fabric(grid: _Grid, latency: float) -> Drawn:
    box = {"x0": -0.3, "x1": grid.across * grid.step_x - 0.5, "y0": FABRIC_Y - 0.35, "y1": FABRIC_Y + 0.15}
    look = {"type": "rect", "line": {"color": NEUTRAL, "width": 1}, "fillcolor": "rgba(138,150,148,0.18)"}
    text = "non-blocking fabric" + (f" · {latency * 1e6:g} µs to start a send" if latency else "")
    middle = {"x": (grid.across * grid.step_x - 0.8) / 2, "y": FABRIC_Y - 0.1}
    return [look | box], [{"text": text, "showarrow": False} | middle]


def _node(grid: _Grid, node: Node, index: int, fastest: float) -> Drawn:
    """The box of a node, its name, and from the first row its line to the fabric. fastest: bytes/s, drawn thickest."""
    left, bottom = grid.corner(index)
    top, middle = bottom + grid.deepest, left + grid.widest / 2
    rate = sum(gpu.send_bandwidth for gpu in node.gpus) / len(node.gpus)
    box = {"x0": left - 0.15, "x1": left + grid.widest + 0.15, "y0": bottom - 0.05, "y1": top + 0.75}
    edge = {"color": NEUTRAL, "width": 1.5 if node.link_bandwidth is None else 3}
    shapes = [{"type": "rect", "line": edge} | box]
    if index < grid.across:
        ends = {"x0": middle, "x1": middle, "y0": FABRIC_Y + 0.15, "y1": bottom - 0.05}
        thick = {"color": NEUTRAL, "width": 1 + 7 * rate / fastest}
        shapes.append({"type": "line", "layer": "below", "line": thick} | ends)
    link = "" if node.link_bandwidth is None else f" · {size(node.link_bandwidth)}/s links"
    plain_text = {"xanchor": "left", "showarrow": False, "font": {"size": SMALLEST}}
    name = {"x": left, "y": top + 0.4, "text": f"{plain(node.name)}{link}"}
    return shapes, [plain_text | name, plain_text | {"x": middle + 0.1, "y": bottom - 0.28, "text": bandwidth(rate)}]


def _draw_gpus(figure: go.Figure, grid: _Grid, cluster: Cluster) -> None:
    """All GPUs as one trace of squares with their ranks, and an entry of the legend for every type."""
    outline = {"color": "#555", "width": 1}
    corners = [(*grid.corner(index), place) for index, node in enumerate(cluster.nodes) for place in range(len(node.gpus))]
    figure.add_scatter(
        x=[left + place % GPUS_ACROSS + 0.5 for left, _, place in corners],
        y=[bottom + place // GPUS_ACROSS + 0.5 for _, bottom, place in corners],
        text=[str(rank) for rank in range(len(cluster.gpus))],
        customdata=[
            f"{plain(name)}<br>{bandwidth(gpu.send_bandwidth)} out, {bandwidth(gpu.receive_bandwidth)} "
            f"in<br>{gpu.memory / 2**30:.3g} GiB, {gpu.flops_fp16 / 1e12:.3g} TFLOP/s at 16 bits"
            for name, gpu in zip(cluster.gpu_names, cluster.gpus, strict=True)
        ],
        mode="markers+text",
        marker={
            "symbol": "square",
            "size": max(14, min(44, 900 // (grid.across * grid.step_x))),
            "color": [gpu_colour(gpu.type) for gpu in cluster.gpus],
            "line": outline,
        },
        textfont={"color": "#1b1b1b", "size": 12},
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=False,
    )
    for gpu_type in dict.fromkeys(gpu.type for gpu in cluster.gpus):
        marker = {"symbol": "square", "size": 12, "color": gpu_colour(gpu_type), "line": outline}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=plain(gpu_type), marker=marker)


def node_rates(cluster: Cluster) -> np.ndarray:
    """float64[node, node] bytes/s from all GPUs of one node (row) to all of another at once, over the fabric; on the diagonal
    over the node's own links where it has some, NaN where it has a single GPU."""
    member = np.eye(len(cluster.nodes))[cluster.node_of_gpu]
    out, into = (cluster.values(field) @ member for field in ("send_bandwidth", "receive_bandwidth"))
    rates = np.minimum(out[:, None], into[None, :])
    for index, node in enumerate(cluster.nodes):
        if len(node.gpus) == 1:
            rates[index, index] = np.nan
        elif node.link_bandwidth is not None:
            rates[index, index] = node.link_bandwidth * len(node.gpus)
    return rates


def link_speeds(cluster: Cluster, dark: bool) -> go.Figure:
    """`node_rates` as a small matrix, darker where faster (logarithmic); the title names the slowest pair of nodes."""
    rates = node_rates(cluster)
    names = [plain(node.name if len(node.name) <= 16 else f"{node.name[:15]}…") for node in cluster.nodes]
    z = np.log10(rates)
    low, high = np.nanmin(z), np.nanmax(z)
    scale = {"z": z, "zmin": low - 0.3, "zmax": max(high, low + 0.3), "colorscale": SEQUENTIAL}
    figure = go.Figure().add_heatmap(
        **scale,
        showscale=False,
        xgap=1,
        ygap=1,
        customdata=[[bandwidth(rate) for rate in row] for row in rates],
        text=[[f"{source} → {target}" for target in names] for source in names],
        hovertemplate="%{text}<br>%{customdata}<extra></extra>",
        hoverongaps=False,
    )
    if len(names) <= NUMBERED_NODES:
        text = [["" if np.isnan(rate) else digits(rate * 8 / 1e9) for rate in row] for row in rates]
        write_numbers(figure, scale, text, dark)
    places = list(range(len(names))) if len(names) <= NAMED_NODES else []
    figure.update_xaxes(tickvals=places, ticktext=names, side="bottom", showgrid=False, zeroline=False)
    figure.update_yaxes(tickvals=places, ticktext=names, autorange="reversed", showgrid=False, zeroline=False)
    between = np.where(np.eye(len(names), dtype=bool), np.nan, rates)
    source, target = np.unravel_index(int(np.nanargmin(between)), between.shape)
    if np.nanmax(between) > between[source, target]:
        title = f"Slowest pair: {bandwidth(between[source, target])}, {names[source]} → {names[target]}"
        alike = int(np.isclose(between, between[source, target]).sum()) - 1
        title += f" and {alike} more" if alike else ""
    else:
        title = f"Every node reaches every other at {bandwidth(between[source, target])}"
    return finish(figure, title, min(420, 110 + 34 * len(names)))


WIDTH, HEIGHT = 200, 84
MOST_NODES = 64
"""More cannot be told apart in so small a picture."""
PAD, GAP = 0.5, 0.6
"""Room around the GPUs of a node, and between nodes, in widths of a GPU."""


def svg(cluster: Cluster) -> str:
    """The picture as text that begins with `<svg`; it has no words, and suits light and dark."""
    nodes = cluster.nodes[:MOST_NODES]
    across_gpus = min(GPUS_ACROSS, max(len(node.gpus) for node in nodes))
    wide = across_gpus + 2 * PAD
    high = max(ceil(len(node.gpus) / across_gpus) for node in nodes) + 2 * PAD
    down = ceil(len(nodes) / max(1, round(sqrt(len(nodes) * WIDTH / HEIGHT * high / wide))))
    across = ceil(len(nodes) / down)  # rows of equal length where there can be
    side = min(16.0, WIDTH / (across * (wide + GAP)), (HEIGHT - 8) / (down * (high + GAP)))
    left = (WIDTH - side * (across * (wide + GAP) - GAP)) / 2
    parts = [f'<line x1="8" x2="{WIDTH - 8}" y1="{HEIGHT - 3}" y2="{HEIGHT - 3}" stroke="{NEUTRAL}" stroke-width="2"/>']
    for place, node in enumerate(nodes):
        row, column = divmod(place, across)
        x, y = left + column * side * (wide + GAP), 1 + row * side * (high + GAP)
        linked = "" if node.link_bandwidth else ' stroke-dasharray="3 2"'
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{side * wide:.1f}" height="{side * high:.1f}" rx="2" fill="none" '
            f'stroke="{NEUTRAL}"{linked}/>'
        )
        parts += [
            f'<rect x="{x + side * (PAD + gpu % across_gpus + 0.1):.1f}" y="{y + side * (PAD + gpu // across_gpus + 0.1):.1f}" '
            f'width="{side * 0.8:.1f}" height="{side * 0.8:.1f}" fill="{gpu_colour(card.type)}"/>'
            for gpu, card in enumerate(node.gpus)
        ]
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'


def exclusive_and_colocated(utilisations: Sequence[Utilisation]) -> go.Figure:
    """Share of the time in which GPUs compute: a bar for the mean, a dot for every GPU.

    utilisations: each model alone, then both colocated
    """
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
