"""A cluster as a small still picture: nodes as boxes, their GPUs as squares in the colour of their type, one fabric below."""

from math import ceil, sqrt

from app.charts.theme import NEUTRAL, gpu_colour
from engine.cluster import Cluster

WIDTH, HEIGHT = 200, 84
GPUS_ACROSS = 4
MOST_NODES = 64
"""More are not told apart in so small a picture."""
PAD, GAP = 0.5, 0.6
"""Of a node around its GPUs, and between nodes, in widths of a GPU."""


def svg(cluster: Cluster) -> str:
    """The picture as a text that begins with `<svg`; it has no words, and suits light and dark."""
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
