"""Charts of affinity: hops between layers, the share that stays on its GPU, and the studies of tokens and recordings."""

import colorsys
from typing import Literal

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import DIVERGING, NEUTRAL, SEQUENTIAL, SMALLEST, TEAL, finish, numbered, plain, tips
from engine.compare.affinity import OutOfDistribution, TokensEnough
from engine.units import digits, share

HEATMAP_HEIGHT = 640
"""Pixels. Cells are about square on a wide page; on a narrow one they are slim."""
LABELLED_EXPERTS = 32
"""With more experts in a layer, only every few of them is named on the axes."""
MOST_LINKS, LABELLED_NODE = 48, 0.04
"""Paths in a Sankey at most; a node carries its name if it has this part of its layer's hops."""
SURE = 3.0
"""Standard errors left of a share that counts as a finding: four tokens of four are none."""
OUTLIER = 2
"""A largest cell this many times the 99.5th percentile of all is drawn in the colour of that percentile."""
LEGEND = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0}
TOKENS, PAIRS = "tokens", "pairs of choices"
"""Units of a hop: a token if only first choices count, else a pair of its choices."""


def heatmap(
    counts: np.ndarray,
    layers: tuple[int, int],
    probability: bool,
    unit: str = TOKENS,
    gpus: tuple[np.ndarray, np.ndarray] | None = None,
    kept: float | None = None,
) -> go.Figure:
    """Hops from the experts of one layer (rows) to those of another (columns).

    counts: float64[expert, expert]
    layers: first and second layer
    probability: True draws each row as a share of its sum instead of counts
    gpus: int[expert] of both layers, to group experts by GPU, with boundaries drawn and blocks that stay outlined
    kept: the share that stays on its GPU, for the title of a grouped heatmap
    """
    experts, (first, last) = len(counts), layers
    row_sum = counts.sum(axis=1, keepdims=True)
    chance = np.divide(counts, row_sum, out=np.full(counts.shape, np.nan), where=row_sum > 0)
    rows = columns = np.arange(experts)
    if gpus is not None:
        rows, columns = (np.argsort(gpu_of_expert, kind="stable") for gpu_of_expert in gpus)
    value = (100 * chance if probability else counts)[np.ix_(rows, columns)].astype(np.float32)
    hover = np.dstack(
        [*np.broadcast_arrays(rows[:, None], columns), *(table[np.ix_(rows, columns)] for table in (counts, chance))]
    ).astype(np.float32)
    most, cut = _end_of_scale(value)
    figure = go.Figure().add_heatmap(
        z=value,
        customdata=hover,
        colorscale=SEQUENTIAL,
        zmin=0,
        zmax=most,
        hovertemplate=f"expert %{{customdata[0]}} of layer {first} → expert %{{customdata[1]}} of layer {last}<br>"
        f"%{{customdata[2]:,.0f}} {unit}, %{{customdata[3]:.1%}} of those of expert %{{customdata[0]}}<extra></extra>",
        colorbar={
            "orientation": "h",
            "thickness": 12,
            "len": 1,
            "y": 1,
            "yanchor": "bottom",
            "ticklabelposition": "outside top",
            "title": {"side": "top", "font": {"size": 12}, "text": (f"% of the row's {unit}" if probability else unit) + cut},
        },
    )
    of_rows, of_columns = gpus or (None, None)
    layout = {
        "xaxis": _axis(f"expert of layer {last}", columns, of_columns) | {"range": [-0.5, experts - 0.5]},
        "yaxis": _axis(f"expert of layer {first}", rows, of_rows) | {"range": [experts - 0.5, -0.5]},
        "shapes": _blocks(*gpus) if gpus else None,
    }
    return finish(figure, _heatmap_title(counts, chance, layers, probability, unit, kept), HEATMAP_HEIGHT, **layout)


def _end_of_scale(value: np.ndarray) -> tuple[float, str]:
    """Return the end of a heatmap's colours, and a note for its bar if larger cells share that colour.

    One cell far above all others, such as all of the few tokens of a rare expert, would leave nothing else to see.
    """
    most = float(np.nanmax(value, initial=0))
    usual = float(np.quantile(seen, 0.995)) if len(seen := value[value > 0]) else 0.0
    return (usual, f", {digits(usual)} and more in one colour") if most > OUTLIER * usual > 0 else (most or 1.0, "")


def _axis(title: str, order: np.ndarray, gpu: np.ndarray | None) -> dict:
    """Ticks by expert, or by GPU, with its experts if they are few."""
    bare = {"showgrid": False, "zeroline": False}
    if gpu is None:
        step = 1 if len(order) <= LABELLED_EXPERTS else -(-len(order) // 16)
        return bare | {"title": title, "tickmode": "linear", "tick0": 0, "dtick": step}
    groups = _groups(gpu)
    few = all(len(experts) <= 4 for _, _, experts in groups) and len(groups) <= 16
    step = -(-len(groups) // 16)
    shown = groups[::step]
    names = [f"GPU {gpu}" + (f"<br>{', '.join(map(str, experts))}" if few else "") for gpu, _, experts in shown]
    places = [start + (len(experts) - 1) / 2 for _, start, experts in shown]
    return bare | {"title": f"{title}, by GPU", "tickvals": places, "ticktext": names}


def _groups(gpu: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    """(GPU, first position, its experts) of every GPU that holds any, in the order of the grouped axis."""
    groups, start = [], 0
    for rank in np.unique(gpu):
        experts = np.flatnonzero(gpu == rank)
        groups.append((int(rank), start, experts))
        start += len(experts)
    return groups


def _blocks(rows: np.ndarray, columns: np.ndarray) -> list[dict]:
    """Thin lines between GPUs, and a frame round every block of hops that stay."""
    cells = len(rows)
    down, across = _groups(rows), {gpu: (start, len(experts)) for gpu, start, experts in _groups(columns)}
    many = len(down) > 16
    thin, frame = ({"color": NEUTRAL, "width": width} for width in ((0.25, 1.5) if many else (0.7, 3)))

    def box(left: float, width: float, top: float, height: float) -> dict:
        return {"x0": left - 0.5, "x1": left + width - 0.5, "y0": top - 0.5, "y1": top + height - 0.5}

    lines = [box(0, cells, start, 0) for _, start, _ in down[1:]]
    lines += [box(start, 0, 0, cells) for start, _ in [*across.values()][1:]]
    kept = [box(*across[gpu], start, len(experts)) for gpu, start, experts in down if gpu in across]
    return [{"type": "line", "line": thin} | line for line in lines] + [
        {"type": "rect", "line": frame} | block for block in kept
    ]


def _heatmap_title(counts, chance, layers, probability: bool, unit: str, kept: float | None) -> str:
    first, last = layers
    if not counts.any():
        return f"No {unit} pass between layers {first} and {last}"
    if kept is not None:
        stay = "stay on their GPU" if last == first + 1 else "are on one GPU in both layers"
        return f"{share(kept)} of {unit} {stay} (layers {first} and {last})"
    if not probability:
        row, column = np.unravel_index(counts.argmax(), counts.shape)
        part = share(counts.max() / counts.sum())
        return f"The busiest path, expert {row} to expert {column}, takes {part} of {unit}"
    row, column = np.unravel_index(np.nanargmax(_at_least(chance, counts.sum(axis=1, keepdims=True))), counts.shape)
    whole = counts[row].sum()
    return f"Expert {row} sends {share(chance[row, column])} of its {whole:,.0f} {unit} to expert {column}"


def _at_least(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Lower ends of Wilson's intervals of the shares `part / whole`; NaN for an empty whole."""
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = SURE * np.sqrt(part * (1 - part) / whole + SURE**2 / (4 * whole**2))
        return (part + SURE**2 / (2 * whole) - spread) / (1 + SURE**2 / whole)


def paths(counts: np.ndarray, first: int, gpu_of_expert: np.ndarray, unit: str = TOKENS) -> go.Figure:
    """Sankey of the strongest hops over consecutive layers: teal stays on its GPU, grey leaves it.

    counts: float64[layer - 1, expert, expert] of the layers shown
    first: number of the first of them
    gpu_of_expert: int[layer, expert] of the same layers
    """
    layers, experts = len(counts) + 1, counts.shape[1]
    strongest = np.argsort(-counts, axis=None, kind="stable")[:MOST_LINKS]
    strongest = strongest[counts.ravel()[strongest] > 0]
    if not len(strongest):
        return finish(go.Figure(), "No paths between these layers", 440)
    layer, here, there = np.unravel_index(strongest, counts.shape)
    value = counts[layer, here, there]
    stays = gpu_of_expert[layer, here] == gpu_of_expert[layer + 1, there]
    through = np.zeros((2, layers, experts))
    np.add.at(through[0], (layer, here), value)
    np.add.at(through[1], (layer + 1, there), value)
    through = through.max(axis=0)
    nodes = _nodes(through, gpu_of_expert)
    number = {node: index for index, node in enumerate(nodes)}
    columns = through.sum(axis=1)
    gpus = int(gpu_of_expert.max()) + 1
    figure = go.Figure().add_sankey(
        arrangement="fixed",
        node={
            "label": [f"{expert}" if through[at, expert] >= LABELLED_NODE * columns.max() else "" for at, expert in nodes],
            "color": [_gpu_hue(gpu_of_expert[node], gpus) for node in nodes],
            "customdata": [
                f"expert {expert} of layer {first + at}, on GPU {gpu_of_expert[at, expert]}" for at, expert in nodes
            ],
            "hovertemplate": "%{customdata}<extra></extra>",
            "pad": 6,
            "thickness": 12,
            "line": {"width": 0},
            "x": [0.001 + 0.998 * at / (layers - 1) for at, _ in nodes],
            "y": _heights(nodes, through),
        },
        link={
            "source": [number[pair] for pair in zip(layer, here, strict=True)],
            "target": [number[pair] for pair in zip(layer + 1, there, strict=True)],
            "value": value,
            "color": np.where(stays, "rgba(0,137,123,0.55)", "rgba(138,150,148,0.30)"),
            "customdata": [share(part) for part in value / counts.sum(axis=(1, 2))[layer]],
            "hovertemplate": f"%{{source.customdata}} →<br>%{{target.customdata}}<br>%{{value:,.0f}} {unit}, "
            "%{customdata} of all between these layers<extra></extra>",
        },
    )
    above = {"y": 1, "yanchor": "bottom", "showarrow": False, "font": {"size": 12}}
    sides = {0: "left", layers - 1: "right"}
    names = [
        above | {"x": at / (layers - 1), "text": f"layer {first + at}", "xanchor": sides.get(at, "center")}
        for at in range(layers)
    ]
    paths = np.count_nonzero(counts)
    which = f"{len(value)} strongest of {paths:,}" if len(value) < paths else f"All {paths}"
    title = f"{which} paths: {share(value[stays].sum() / value.sum())} of hops stay"
    return finish(figure, title, 440, top=64, annotations=names)


def _nodes(through: np.ndarray, gpu_of_expert: np.ndarray) -> list[tuple[int, int]]:
    """(layer, expert) of every expert with a path through it, those of one GPU next to each other."""
    layers, experts = through.shape
    return [
        (at, expert)
        for at in range(layers)
        for expert in np.lexsort((range(experts), gpu_of_expert[at]))
        if through[at, expert] > 0
    ]


def _heights(nodes: list[tuple[int, int]], through: np.ndarray) -> list[float]:
    """Return the middle of each node from the top: as much room as its column has, in the order of the nodes."""
    most, gap = through.sum(axis=1).max(), 0.015
    counts = np.count_nonzero(through, axis=1)
    scale = (1 - gap * counts.max()) / most
    top = {at: (1 - scale * through[at].sum() - gap * counts[at]) / 2 for at in range(len(through))}
    heights = []
    for at, expert in nodes:
        height = scale * through[at, expert]
        heights.append(float(np.clip(top[at] + height / 2, 0.001, 0.999)))
        top[at] += height + gap
    return heights


def _gpu_hue(gpu: int, gpus: int) -> str:
    """A colour a GPU, evenly round the circle; never the only sign."""
    red, green, blue = colorsys.hls_to_rgb(gpu / gpus, 0.55, 0.45)
    return f"rgb({255 * red:.0f},{255 * green:.0f},{255 * blue:.0f})"


def kept_by_pair(kept: np.ndarray, limit: np.ndarray | None, chance: float, unit: str = TOKENS) -> go.Figure:
    """Share of hops that stay on their GPU between each layer and the next.

    kept: float64[layer - 1], NaN without hops
    limit: float64[layer - 1], the most that any placement can keep
    chance: the share if experts were drawn at random
    """
    pairs = np.arange(len(kept))
    step = -(-len(kept) // 8)
    figure = go.Figure()
    figure.add_bar(
        x=pairs,
        y=100 * kept,
        marker_color=TEAL,
        name="this placement",
        showlegend=False,
        **tips(
            f"layer {pair} → {pair + 1}: {share(value)} of {unit} stay" if value == value else "no hops"
            for pair, value in enumerate(kept)
        ),
    )
    if limit is not None:
        # A dash over each bar, with a break between them.
        across = np.column_stack([pairs - 0.4, pairs + 0.4, np.full(len(pairs), np.nan)]).ravel()
        figure.add_scatter(
            x=across,
            y=np.repeat(100 * limit, 3),
            mode="lines",
            line={"color": NEUTRAL, "width": 1.5, "dash": "dash"},
            name="upper bound (proven)",
            hovertemplate="upper bound %{y:.1f} % (proven)<extra></extra>",
        )
    figure.add_scatter(
        x=[-0.5, len(kept) - 0.5],
        y=[100 * chance] * 2,
        mode="lines",
        name=f"by chance, {share(chance)}",
        line={"color": NEUTRAL, "width": 1.5, "dash": "dot"},
        hoverinfo="skip",
    )
    ticktext = [f"{pair}→{pair + 1}" if step == 1 else str(pair) for pair in pairs[::step]]
    range = [-0.5, len(kept) - 0.5]
    figure.update_xaxes(title="from layer → to the next", tickvals=pairs[::step], ticktext=ticktext, tickangle=0, range=range)
    highest = np.nanmax([chance, *kept, *([] if limit is None else limit)])
    figure.update_yaxes(title=f"{unit} kept, %", range=[0, 108 * highest])
    if np.isnan(kept).all():
        title = "No hops between layers"
    else:
        least, most = int(np.nanargmin(kept)), int(np.nanargmax(kept))
        title = f"{share(kept[most])} stay from layer {most} to {most + 1}"
        if least != most:
            title += f", only {share(kept[least])} from {least} to {least + 1}"
    return finish(figure, title, 300, top=64, bargap=0.2, legend=LEGEND)


HOLDS = 0.99
"""A plan that keeps this part of the own plan's share holds on a recording."""
View = Literal["share", "row", "own"]


def tokens_enough(study: TokensEnough) -> go.Figure:
    """Share of held-out hops kept against tokens planned from, with lines for no, perfect and any knowledge."""
    means = study.mean_by_size()
    figure = go.Figure()
    figure.add_scatter(
        x=[point.tokens for point in study.points],
        y=[100 * point.kept for point in study.points],
        mode="markers",
        marker={"color": TEAL, "size": 8, "symbol": "circle-open"},
        name="one sample",
        hovertemplate="%{x:,} tokens: %{y:.2f} %<extra></extra>",
    )
    hovertemplate = "%{x:,} tokens, mean: %{y:.2f} %<extra></extra>"
    y = [100 * mean for mean in means.values()]
    figure.add_scatter(
        x=list(means), y=y, mode="lines", line={"color": TEAL, "width": 2}, name="mean", hovertemplate=hovertemplate
    )
    lines = [(study.linear, "linear blocks", "dot"), (study.limit, "at most (proven)", "dash")]
    if study.ceiling is not None:
        lines.append((study.ceiling, "planned on the held-out half itself", "dashdot"))
    for value, label, dash in lines:
        # The two upper lines can be close together, so their texts stand on either side.
        below = label.startswith("planned") and study.limit - value < 0.1 * study.limit
        figure.add_hline(
            y=100 * value,
            line={"dash": dash, "width": 1.5, "color": NEUTRAL},
            annotation={"text": f"{label}, {share(value)}", "font": {"size": SMALLEST}},
            annotation_position="bottom left" if below else "top left",
        )
    sizes = sorted({*means, study.tokens})
    low, high = np.log10(min(sizes)), np.log10(study.tokens)
    room = 0.04 * max(high - low, 1.0)
    figure.update_xaxes(
        type="log",
        title="tokens planned from",
        tickvals=sizes,
        ticktext=[f"{size:,}" for size in sizes],
        range=[low - room, high + room],
        showgrid=False,
    )
    figure.update_yaxes(title="held-out hops kept on their GPU, %", range=[0, 108 * max(study.limit, study.linear)])
    return finish(figure, _enough_title(study), 440, top=68, legend=LEGEND)


def _enough_title(study: TokensEnough) -> str:
    if not study.complete:
        return f"{len(study.points)} plans so far"
    size = study.enough()
    if size is None:
        return "No plan made from samples beats linear blocks"
    if size == study.tokens:
        return f"All {study.tokens:,} tokens are needed: more might keep more"
    if study.gain(size) >= 1:
        return f"{size:,} tokens gain as much as all {study.tokens:,}"
    return f"{size:,} tokens get {share(study.gain(size))} of what all {study.tokens:,} gain"


def out_of_distribution(study: OutOfDistribution, view: View = "share", dark: bool = False) -> go.Figure:
    """Plans (rows) scored on recordings (columns), with numbers.

    view: "share" of hops kept, with a row for linear blocks; "row": each row as a ratio to its own recording (Table III);
        "own": each column as a ratio to the plan made for that recording
    dark: the page's theme, for the colour of the numbers
    """
    names = [plain(name) for name in study.names]
    rows = [f"plan on {name}" for name in names]
    value = {"share": study.matrix, "row": study.row_normalised, "own": study.against_own}[view]()
    if view == "share":
        value, rows = np.vstack([value, study.linear]), [*rows, "linear blocks"]
        scale = {"colorscale": SEQUENTIAL, "zmin": 0, "zmax": 100 * np.nanmax(value) or 1, "z": 100 * value}
        bar, text = "% kept", [[_blank(cell, share) for cell in row] for row in value]
    else:
        reach = max(float(np.nanmax(np.abs(value - 1), initial=0.0)), 0.05)
        scale = {"colorscale": DIVERGING, "zmin": 1 - reach, "zmax": 1 + reach, "z": value}
        bar, text = "ratio", [[_blank(cell, lambda quotient: f"{quotient:.3f}") for cell in row] for row in value]
    across, down = np.arange(len(names)), np.arange(len(rows))
    hover = [
        [f"{row}, scored on {name}: {text[i][j] or 'not yet'}" for j, name in enumerate(names)] for i, row in enumerate(rows)
    ]
    figure = numbered(scale, hover, text, dark, {"title": bar, "thickness": 12})
    figure.update_xaxes(
        title="scored on the held-out half of", tickvals=across, ticktext=names, showgrid=False, range=[-0.5, len(names) - 0.5]
    )
    figure.update_yaxes(tickvals=down, ticktext=rows, range=[len(rows) - 0.5, -0.5], showgrid=False, zeroline=False)
    return finish(figure, _transfer_title(study), 120 + 56 * (len(rows) + 1))


def _blank(value: float, text) -> str:
    return "" if np.isnan(value) else text(value)


def _transfer_title(study: OutOfDistribution) -> str:
    if not study.complete:
        return f"{len(study.kept)} of {len(study.names)} plans made so far"
    own = study.against_own()
    if len(study.names) == 1:
        return f"On text it has not seen, the plan keeps {share(study.kept[0][0])}"
    others = own[~np.eye(len(study.names), dtype=bool)]
    if np.isnan(others).all():
        return "No plan keeps anything"
    least, most = float(np.nanmin(others)), float(np.nanmax(others))
    if least >= HOLDS:
        return f"Every plan holds everywhere, within {share(1 - HOLDS)}"
    return f"Plans from elsewhere keep {digits(least)}× to {digits(most)}× the own plan's"
