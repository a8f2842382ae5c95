"""Charts of the affinity studies: how many tokens are enough, and does a plan hold on other recordings."""

from typing import Literal

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import DIVERGING, NEUTRAL, SEQUENTIAL, SMALLEST, TEAL, finish, plain, write_numbers
from engine.studies.affinity import OutOfDistribution, TokensEnough
from engine.units import digits, share

HOLDS = 0.99
"""A plan that keeps this part of what the own plan keeps holds on a recording."""
View = Literal["share", "row", "own"]


def tokens_enough(study: TokensEnough) -> go.Figure:
    """Share of held-out hops kept against tokens planned from, beside what no, perfect and any knowledge would give."""
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
    figure.add_scatter(
        x=list(means),
        y=[100 * mean for mean in means.values()],
        mode="lines",
        line={"color": TEAL, "width": 2},
        name="mean",
        hovertemplate="%{x:,} tokens, mean: %{y:.2f} %<extra></extra>",
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
    legend = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0}
    return finish(figure, _enough_title(study), 440, top=68, legend=legend)


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
    "own": each column as a ratio to the plan made for that recording. dark: of the page, for the colour of the numbers.
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
        [f"{row}, scored on {name}: {text[i][j] or 'not yet'}" for j, name in enumerate(names)]
        for i, row in enumerate(rows)
    ]
    figure = go.Figure(
        go.Heatmap(
            x=across,
            y=down,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            xgap=2,
            ygap=2,
            colorbar={"title": bar, "thickness": 12},
            **scale,
        )
    )
    write_numbers(figure, scale, text, dark)
    figure.update_xaxes(
        title="scored on the held-out half of",
        tickvals=across,
        ticktext=names,
        showgrid=False,
        range=[-0.5, len(names) - 0.5],
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
