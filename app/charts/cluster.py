"""The cluster as a picture, nodes of GPUs around one fabric, and how fast its nodes reach each other."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, SEQUENTIAL, SMALLEST, finish, gpu_colour, plain, write_numbers
from engine.cluster import Cluster, Node
from engine.units import bandwidth, digits, size

GPUS_ACROSS = 4
NODES_ACROSS = 4
FABRIC_Y = -0.9
NUMBERED_NODES, NAMED_NODES = 10, 24
"""Up to how many nodes the matrix of speeds has numbers in its cells, and names at its sides."""


def picture(cluster: Cluster) -> go.Figure:
    """Nodes as boxes, GPUs as squares in the colour of their type, lines to the fabric as thick as their bandwidth."""
    figure, grid = go.Figure(), _Grid.of(cluster)
    _draw_fabric(figure, grid, cluster.latency)
    fastest, slowest = (pick(gpu.send_bandwidth for gpu in cluster.gpus) for pick in (max, min))
    for index, node in enumerate(cluster.nodes):
        _draw_node(figure, grid, node, index, fastest)
    _draw_gpus(figure, grid, cluster)
    figure.update_xaxes(visible=False, range=[-0.5, grid.across * grid.step_x - 0.3])
    figure.update_yaxes(visible=False, range=[FABRIC_Y - 0.5, grid.rows * grid.step_y])
    title = f"{len(cluster.gpus)} GPUs in {len(cluster.nodes)} nodes"
    title += f": the fastest port is {fastest / slowest:.3g}× the slowest" if fastest > slowest else ", all ports equal"
    return finish(
        figure,
        title,
        int(min(900, 120 + 62 * grid.rows * grid.step_y)),
        dragmode="pan",
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
    )


@dataclass(frozen=True)
class _Grid:
    """Where nodes stand: `across` in a row, each with room for `widest` GPUs across and `deepest` down."""

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


def _draw_fabric(figure: go.Figure, grid: _Grid, latency: float) -> None:
    figure.add_shape(
        type="rect",
        x0=-0.3,
        x1=grid.across * grid.step_x - 0.5,
        y0=FABRIC_Y - 0.35,
        y1=FABRIC_Y + 0.15,
        line={"color": NEUTRAL, "width": 1},
        fillcolor="rgba(138,150,148,0.18)",
    )
    start_up = f" · {latency * 1e6:g} µs to start a send" if latency else ""
    figure.add_annotation(
        x=(grid.across * grid.step_x - 0.8) / 2,
        y=FABRIC_Y - 0.1,
        text=f"non-blocking fabric{start_up}",
        showarrow=False,
    )


def _draw_node(figure: go.Figure, grid: _Grid, node: Node, index: int, fastest: float) -> None:
    """The box of a node, its name, and from the first row its line to the fabric. fastest: bytes/s, drawn thickest."""
    left, bottom = grid.corner(index)
    figure.add_shape(
        type="rect",
        x0=left - 0.15,
        x1=left + grid.widest + 0.15,
        y0=bottom - 0.05,
        y1=bottom + grid.deepest + 0.75,
        line={"color": NEUTRAL, "width": 1.5 if node.link_bandwidth is None else 3},
    )
    link = "" if node.link_bandwidth is None else f" · {size(node.link_bandwidth)}/s links"
    figure.add_annotation(
        x=left,
        y=bottom + grid.deepest + 0.4,
        xanchor="left",
        text=f"{plain(node.name)}{link}",
        showarrow=False,
        font_size=12,
    )
    rate = sum(gpu.send_bandwidth for gpu in node.gpus) / len(node.gpus)
    middle = left + grid.widest / 2
    if index < grid.across:
        figure.add_shape(
            type="line",
            x0=middle,
            x1=middle,
            y0=FABRIC_Y + 0.15,
            y1=bottom - 0.05,
            layer="below",
            line={"color": NEUTRAL, "width": 1 + 7 * rate / fastest},
        )
    figure.add_annotation(
        x=middle + 0.1, y=bottom - 0.28, text=bandwidth(rate), showarrow=False, xanchor="left", font_size=SMALLEST
    )


def _draw_gpus(figure: go.Figure, grid: _Grid, cluster: Cluster) -> None:
    """All GPUs as one trace of squares with their ranks, and an entry of the legend for every type."""
    outline = {"color": "#555", "width": 1}
    corners = [
        (*grid.corner(index), place) for index, node in enumerate(cluster.nodes) for place in range(len(node.gpus))
    ]
    figure.add_scatter(
        x=[left + place % GPUS_ACROSS + 0.5 for left, _, place in corners],
        y=[bottom + place // GPUS_ACROSS + 0.5 for _, bottom, place in corners],
        text=[str(rank) for rank in range(len(cluster.gpus))],
        customdata=[
            f"{plain(name)}<br>{bandwidth(gpu.send_bandwidth)} out, "
            f"{bandwidth(gpu.receive_bandwidth)} in<br>{gpu.memory / 2**30:.3g} GiB, "
            f"{gpu.flops_fp16 / 1e12:.3g} TFLOP/s at 16 bits"
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
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=plain(gpu_type),
            marker={"symbol": "square", "size": 12, "color": gpu_colour(gpu_type), "line": outline},
        )


def node_rates(cluster: Cluster) -> np.ndarray:
    """float64[node, node] bytes/s from all GPUs of one node (row) to all of another at once, over the fabric; on the
    diagonal over the node's own links where it has some, NaN where it has a single GPU."""
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
    figure = go.Figure(
        go.Heatmap(
            **scale,
            showscale=False,
            xgap=1,
            ygap=1,
            customdata=[[bandwidth(rate) for rate in row] for row in rates],
            text=[[f"{source} → {target}" for target in names] for source in names],
            hovertemplate="%{text}<br>%{customdata}<extra></extra>",
            hoverongaps=False,
        )
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
