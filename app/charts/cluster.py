"""The cluster as a picture: nodes of GPUs around one fabric."""

import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, finish, gpu_colour, plain
from engine.cluster import Cluster
from engine.units import bandwidth, size

GPUS_ACROSS = 4
NODES_ACROSS = 4


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
        type="rect", x0=-0.3, x1=across * step_x - 0.5, y0=fabric_y - 0.35, y1=fabric_y + 0.15,
        line={"color": NEUTRAL, "width": 1}, fillcolor="rgba(138,150,148,0.18)",
    )  # fmt: skip
    latency = f" · {cluster.latency * 1e6:g} µs to start a send" if cluster.latency else ""
    figure.add_annotation(
        x=(across * step_x - 0.8) / 2, y=fabric_y - 0.1, text=f"non-blocking fabric{latency}", showarrow=False
    )
    points: dict[str, list] = {"x": [], "y": [], "colour": [], "label": [], "hover": []}
    rank = 0
    for index, node in enumerate(cluster.nodes):
        left, top = index % across * step_x, index // across * step_y
        figure.add_shape(
            type="rect", x0=left - 0.15, x1=left + widest + 0.15, y0=top - 0.05, y1=top + deepest + 0.75,
            line={"color": NEUTRAL, "width": 1.5 if node.link_bandwidth is None else 3},
        )  # fmt: skip
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
                type="line", x0=middle, x1=middle, y0=fabric_y + 0.15, y1=top - 0.05, layer="below",
                line={"color": NEUTRAL, "width": 1 + 7 * rate / fastest},
            )  # fmt: skip
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
        x=points["x"], y=points["y"], text=points["label"], customdata=points["hover"], mode="markers+text",
        marker={"symbol": "square", "size": marker, "color": points["colour"], "line": {"color": "#555", "width": 1}},
        textfont={"color": "#1b1b1b", "size": 12}, hovertemplate="%{customdata}<extra></extra>", showlegend=False,
    )  # fmt: skip
    for type_name in dict.fromkeys(gpu.type for gpu in cluster.gpus):
        figure.add_scatter(
            x=[None], y=[None], mode="markers", name=plain(type_name),
            marker={"symbol": "square", "size": 12, "color": gpu_colour(type_name), "line": {"color": "#555", "width": 1}},
        )  # fmt: skip
    figure.update_xaxes(visible=False, range=[-0.5, across * step_x - 0.3])
    figure.update_yaxes(visible=False, range=[fabric_y - 0.5, rows * step_y])
    slowest = min(gpu.send_bandwidth for gpu in cluster.gpus)
    title = f"{len(cluster.gpus)} GPUs in {len(cluster.nodes)} nodes"
    title += f": the fastest port is {fastest / slowest:.3g}× the slowest" if fastest > slowest else ", all ports equal"
    return finish(
        figure, title, int(min(900, 120 + 62 * rows * step_y)), dragmode="pan",
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
    )  # fmt: skip
