"""The cluster as a picture, nodes of GPUs around one fabric, and how fast its nodes reach each other."""

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, SEQUENTIAL, finish, gpu_colour, plain, write_numbers
from engine.cluster import Cluster
from engine.units import bandwidth, digits, size

GPUS_ACROSS = 4
NODES_ACROSS = 4
NUMBERED_NODES, NAMED_NODES = 10, 24
"""Up to how many nodes the matrix of speeds has numbers in its cells, and names at its sides."""


def picture(cluster: Cluster) -> go.Figure:
    """Nodes as boxes, GPUs as squares in the colour of their type, lines to the fabric as thick as their bandwidth."""
    figure = go.Figure()
    deepest = max(-(-len(node.gpus) // GPUS_ACROSS) for node in cluster.nodes)
    widest = min(GPUS_ACROSS, max(len(node.gpus) for node in cluster.nodes))
    step_x, step_y = widest + 0.8, deepest + 1.6
    across = min(NODES_ACROSS, len(cluster.nodes))
    rows = -(-len(cluster.nodes) // across)
    fastest = max(gpu.send_bandwidth for gpu in cluster.gpus)
    fabric_y = -0.9
    figure.add_shape(
        type="rect",
        x0=-0.3,
        x1=across * step_x - 0.5,
        y0=fabric_y - 0.35,
        y1=fabric_y + 0.15,
        line={"color": NEUTRAL, "width": 1},
        fillcolor="rgba(138,150,148,0.18)",
    )
    latency = f" · {cluster.latency * 1e6:g} µs to start a send" if cluster.latency else ""
    figure.add_annotation(
        x=(across * step_x - 0.8) / 2, y=fabric_y - 0.1, text=f"non-blocking fabric{latency}", showarrow=False
    )
    points: dict[str, list] = {"x": [], "y": [], "colour": [], "label": [], "hover": []}
    rank = 0
    for index, node in enumerate(cluster.nodes):
        left, top = index % across * step_x, index // across * step_y
        figure.add_shape(
            type="rect",
            x0=left - 0.15,
            x1=left + widest + 0.15,
            y0=top - 0.05,
            y1=top + deepest + 0.75,
            line={"color": NEUTRAL, "width": 1.5 if node.link_bandwidth is None else 3},
        )
        link = "" if node.link_bandwidth is None else f" · {size(node.link_bandwidth)}/s links"
        figure.add_annotation(
            x=left,
            y=top + deepest + 0.4,
            xanchor="left",
            text=f"{plain(node.name)}{link}",
            showarrow=False,
            font_size=12,
        )
        rate = sum(gpu.send_bandwidth for gpu in node.gpus) / len(node.gpus)
        middle = left + widest / 2
        if index < across:
            figure.add_shape(
                type="line",
                x0=middle,
                x1=middle,
                y0=fabric_y + 0.15,
                y1=top - 0.05,
                layer="below",
                line={"color": NEUTRAL, "width": 1 + 7 * rate / fastest},
            )
        figure.add_annotation(
            x=middle + 0.1, y=top - 0.28, text=bandwidth(rate), showarrow=False, xanchor="left", font_size=11
        )
        for place, gpu in enumerate(node.gpus):
            points["x"].append(left + place % GPUS_ACROSS + 0.5)
            points["y"].append(top + place // GPUS_ACROSS + 0.5)
            points["colour"].append(gpu_colour(gpu.type))
            points["label"].append(str(rank))
            points["hover"].append(
                f"{plain(cluster.gpu_names[rank])}<br>{bandwidth(gpu.send_bandwidth)} out, "
                f"{bandwidth(gpu.receive_bandwidth)} in<br>{gpu.memory / 2**30:.3g} GiB, "
                f"{gpu.flops_fp16 / 1e12:.3g} TFLOP/s at 16 bits"
            )
            rank += 1
    marker = max(14, min(44, 900 // (across * step_x)))
    figure.add_scatter(
        x=points["x"],
        y=points["y"],
        text=points["label"],
        customdata=points["hover"],
        mode="markers+text",
        marker={"symbol": "square", "size": marker, "color": points["colour"], "line": {"color": "#555", "width": 1}},
        textfont={"color": "#1b1b1b", "size": 12},
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=False,
    )
    for type_name in dict.fromkeys(gpu.type for gpu in cluster.gpus):
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=plain(type_name),
            marker={
                "symbol": "square",
                "size": 12,
                "color": gpu_colour(type_name),
                "line": {"color": "#555", "width": 1},
            },
        )
    figure.update_xaxes(visible=False, range=[-0.5, across * step_x - 0.3])
    figure.update_yaxes(visible=False, range=[fabric_y - 0.5, rows * step_y])
    slowest = min(gpu.send_bandwidth for gpu in cluster.gpus)
    title = f"{len(cluster.gpus)} GPUs in {len(cluster.nodes)} nodes"
    title += f": the fastest port is {fastest / slowest:.3g}× the slowest" if fastest > slowest else ", all ports equal"
    return finish(
        figure,
        title,
        int(min(900, 120 + 62 * rows * step_y)),
        dragmode="pan",
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
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
    else:
        title = f"Every node reaches every other at {bandwidth(between[source, target])}"
    return finish(figure, title, min(420, 110 + 34 * len(names)))
