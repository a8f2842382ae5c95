"""Charts of many plans: balance against affinity, plans on other recordings, Lina at run time, and spare slots."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import KIND_COLOURS, NEUTRAL, SECOND, SEQUENTIAL, SMALLEST, TEAL, finish, numbered, plain
from engine.compare.judge import CONFIDENCE
from engine.compare.redundancy import Knee, RedundancyPoint
from engine.jobs.scores import LinaRun
from engine.simulate.two_phase import Figures
from engine.timeline import over_layers
from engine.units import SIZE, TIME, digits, ratio, scale_of, seconds, share, signed, size

SCORES = {"seconds": "Time (simulated)", "balancedness": "Balancedness", "kept_local": "Kept local"}
SCHEMES = {
    "baseline": ("No scheduling", NEUTRAL, ""),
    "lina": ("Lina, both phases", TEAL, ""),
    "without_estimation": ("Without estimation", KIND_COLOURS["dispatch"], "/"),
    "without_fine_tuning": ("Without fine-tuning", KIND_COLOURS["combine"], "."),
}
HEIGHT = 380
LEGEND = {"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top"}
TIMES = {"inference": "Batch time", "layer": "Layer time", "all_to_all": "All-to-all time"}


class Across(NamedTuple):
    """The quantity that a front weighs against balance.

    key: field of its points
    factor: from the field to the drawn value
    axis: title of the axis
    unit: suffix of a drawn value in a tip
    written: a value as text, before its noun
    better: 1 if more is better, -1 if less is
    """

    key: str
    factor: float
    axis: str
    unit: str
    written: Callable[[float], str]
    noun: str
    better: int


HOPS = Across("kept_share", 100, "hops kept on their GPU, %", "% kept", share, "kept", 1)
ROWS = Across("rows", 1, "rows a token sends in a layer", "rows per token", digits, "rows per token", -1)


def front(
    points: list[dict],
    others: dict[str, tuple[float, float]],
    elsewhere: list[tuple[float, float]] | None = None,
    where: str = "",
    across: Across = HOPS,
) -> go.Figure:
    """Kept share, or rows per token with few to the right, across, balancedness up; the better corner is at the top right.

    points: kept_share or rows, balancedness, weight, seconds and perhaps overload (`Balance.factors`, on the open recording) of
        every placement of the front; others: (kept share or rows, balancedness) of other plans by name; elsewhere: the front's
        points on another recording, called `where`.
    """
    points = sorted(points, key=lambda point: across.better * point[across.key])
    factor, unit = scale_of(max((point["seconds"] for point in points), default=1.0), TIME)
    figure = go.Figure()
    figure.add_scatter(
        x=[across.factor * point[across.key] for point in points],
        y=[point["balancedness"] for point in points],
        mode="lines+markers",
        name="front",
        line={"color": NEUTRAL, "width": 1, "shape": "vh"},
        marker={
            "size": 14,
            "color": [point["seconds"] / factor for point in points],
            "colorscale": SEQUENTIAL,
            "colorbar": {"title": f"{unit} per pass"},
            "line": {"color": TEAL, "width": 1.5},
        },
        text=[
            f"weight {point['weight']:.2f}<br>{across.written(point[across.key])} {across.noun}, balancedness "
            f"{digits(point['balancedness'])}<br>{seconds(point['seconds'])} simulated{_overload(point.get('overload'))}"
            for point in points
        ],
        hovertemplate="%{text}<extra></extra>",
    )
    if elsewhere:
        figure.add_scatter(
            x=[across.factor * value for value, _ in elsewhere],
            y=[balancedness for _, balancedness in elsewhere],
            mode="markers",
            name=f"on {plain(where)}",
            marker={"size": 11, "symbol": "circle-open", "color": SECOND, "line": {"width": 2}},
            hovertemplate=f"on {plain(where)}: %{{x:.3~g}} {across.unit}, balancedness %{{y:.3f}}<extra></extra>",
        )
    if others:
        _add_others(figure, others, across)
    figure.update_xaxes(title=across.axis, autorange=True if across.better > 0 else "reversed")
    figure.update_yaxes(title="balancedness (mean / max GPU load)")
    title = "No placement has both"
    if len(points) > 1:
        best, other = points[-1], points[0]
        title = (
            f"From {across.written(other[across.key])} {across.noun} at balancedness {digits(other['balancedness'])} to "
            f"{across.written(best[across.key])} at {digits(best['balancedness'])}"
        )
    return finish(figure, title, 460, legend=LEGEND)


def _add_others(figure: go.Figure, others: dict[str, tuple[float, float]], across: Across) -> None:
    """Draw other plans by name; those at the same point share a label."""
    together: dict[tuple[float, float], list[str]] = {}
    for name, (value, balancedness) in others.items():
        at = round(across.factor * value, 1 if across is HOPS else 3), round(balancedness, 3)
        together.setdefault(at, []).append(plain(name))
    figure.add_scatter(
        x=[value for value, _ in together],
        y=[balancedness for _, balancedness in together],
        mode="markers+text",
        name="other plans",
        text=[", ".join(names) for names in together.values()],
        textposition="top right",
        textfont={"size": SMALLEST},
        marker={"size": 10, "symbol": "diamond", "color": NEUTRAL},
        hovertemplate=f"%{{text}}: %{{x:.3~g}} {across.unit}, balancedness %{{y:.3f}}<extra></extra>",
    )


def _overload(factors: dict[str, float] | None) -> str:
    return "" if factors is None else f"<br>overload factor {ratio(factors['mean'])}; {over_layers(factors)}"


ALIKE = 1e-3
"""Relative difference at which two times read as equal."""
LEAST_SPAN = 0.05
"""Least span of the colours of scores: small differences are not to look like large ones."""


def matrix(
    names: Sequence[str],
    table: list[list[float | None]],
    what: str,
    dark: bool = False,
    overload: list[list[dict[str, float] | None]] | None = None,
) -> go.Figure:
    """Plans by row, scored on the recording of each column; the best of every column is 100 % for times.

    table: [plan made on][scored on], None if not reached
    what: a key of SCORES
    dark: the page's theme
    overload: `Balance.factors` by cell, for the tips of balancedness
    """
    values = np.array([[np.nan if cell is None else cell for cell in row] for row in table], dtype=float)
    count, missing = len(names), int(np.isnan(values).sum())
    names = [plain(name) for name in names]
    if what == "seconds":
        factor, unit = scale_of(float(np.nanmax(values)) if missing < values.size else 1.0, TIME)
        own = np.diag(values)
        shown, label = np.divide(values, own, out=np.full_like(values, np.nan), where=own > 0), "× own plan's time"
        shown[np.abs(shown - 1) <= ALIKE] = 1.0
        text = [[f"{digits(cell / factor)} {unit}" if cell == cell else "…" for cell in row] for row in values]
        worst = float(np.nanmax(shown, initial=1.0))
        title = "No plan is slower on another recording than that recording's own, within 0.1 %"
        if worst > 1:
            title = f"On a recording it was not made from, a plan takes up to {ratio(worst)} of that recording's own plan"
        low = float(np.nanmin(shown, initial=1.0))
    else:
        shown, label, low = values, SCORES[what].lower(), 0.0
        text = [[digits(cell) if cell == cell else "…" for cell in row] for row in values]
        off = values[~np.eye(count, dtype=bool)]
        least = float(np.nanmin(off)) if np.isfinite(off).any() else float("nan")
        title = f"{SCORES[what]} away from home falls to {digits(least)}" if least == least else SCORES[what]
    if missing:
        title = f"{values.size - missing} of {values.size} scores so far"
    high = float(np.nanmax(shown, initial=low + LEAST_SPAN))
    scale = {"z": shown, "zmin": low, "zmax": high, "colorscale": SEQUENTIAL}
    more = overload if what == "balancedness" and overload is not None else [[None] * count] * count
    hover = [
        [f"made from {names[i]}<br>scored on {names[j]}: {text[i][j]}{_overload(more[i][j])}" for j in range(count)]
        for i in range(count)
    ]
    figure = numbered(scale, hover, text, dark, {"title": label})
    ticks = {"tickvals": np.arange(count), "ticktext": names, "showgrid": False}
    figure.update_xaxes(title="scored on", range=[-0.5, count - 0.5], **ticks)
    figure.update_yaxes(title="plan made from", range=[count - 0.5, -0.5], zeroline=False, **ticks)
    return finish(figure, title, 160 + 60 * count)


def lina(figures: Mapping[str, Figures], length: int, what: str = "inference") -> go.Figure:
    """Times over the ideal, median and 95th percentile, by scheme (Lina, Figures 16 and 17).

    what: "inference" (a whole batch), "layer" or "all_to_all" (of the layers that Lina schedules)
    """
    figure = go.Figure()
    for scheme, (title, colour, pattern) in SCHEMES.items():
        values = [getattr(figures[scheme], f"{part}_{what}") for part in ("median", "tail")]
        figure.add_bar(
            x=["median", "95th percentile"],
            y=values,
            name=title,
            text=[f"{digits(value)}×" for value in values],
            marker={"color": colour, "pattern": {"shape": pattern}},
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"{title}: %{{y:.3f}}× ideal<extra></extra>",
        )
    figure.add_hline(y=1, line={"dash": "dash", "width": 1.5, "color": NEUTRAL}, annotation_text="ideal")
    gain = getattr(figures["baseline"], f"median_{what}") / getattr(figures["lina"], f"median_{what}")
    verdict = f"is {ratio(gain)} as fast as" if gain >= 1 else f"takes {ratio(1 / gain)} the time of"
    figure.update_yaxes(title=f"{TIMES[what].lower()} / ideal", rangemode="tozero")
    title = f"Path length {length}: Lina {verdict} no scheduling (median)"
    return finish(figure, title, HEIGHT, barmode="group", legend=LEGEND)


def accuracy(runs: Sequence[LinaRun]) -> go.Figure:
    """Share of right estimates by layer, one line a path length (Lina, Figure 19)."""
    figure = go.Figure()
    dashes = ("solid", "dash", "dot", "dashdot")
    for turn, run in enumerate(runs):
        length = run.options.path_length
        values = [None if accuracy is None else 100 * accuracy for accuracy in run.accuracy_of_layer]
        figure.add_scatter(
            x=list(range(len(values))),
            y=values,
            mode="lines+markers",
            name=f"path length {length}",
            line={"color": TEAL if turn == 0 else SECOND if turn == 1 else NEUTRAL, "dash": dashes[turn % len(dashes)]},
            hovertemplate=f"path length {length}, layer %{{x}}: %{{y:.0f}} %<extra></extra>",
        )
    best = max(runs, key=lambda run: run.accuracy)
    figure.update_xaxes(title="MoE layer", dtick=1)
    figure.update_yaxes(title="batches with the right top experts, %", range=[0, 102])
    title = f"Path length {best.options.path_length} is right most often: {share(best.accuracy)}"
    return finish(figure, title, HEIGHT, legend=LEGEND)


BAND = "rgba(0,137,123,0.3)"
"""The teal of the curve, for its interval."""


def spare_slots(points: Sequence[RedundancyPoint], advised: Knee | None, held_out: bool) -> go.Figure:
    """Gain over the fewest slots with its interval, a point for every number of them, hollow where engines do not take it.

    points: fewest slots first, at least one
    advised: None: not known yet
    held_out: True if the points are judged on other recordings than the one planned on
    """
    factor, unit = scale_of(max(points[-1].memory_bytes, 1.0), SIZE)
    places, all_even = list(range(len(points))), all(point.even for point in points)
    figure = go.Figure()
    y = [100 * bound for bound in (*(at.interval[0] for at in points), *(at.interval[1] for at in reversed(points)))]
    x = [*places, *reversed(places)]
    figure.add_scatter(
        x=x, y=y, fill="toself", fillcolor=BAND, line={"width": 0}, mode="lines", hoverinfo="skip", showlegend=False
    )
    figure.add_scatter(
        x=places,
        y=[100 * point.gain for point in points],
        mode="lines+markers",
        line={"color": TEAL, "width": 2},
        marker={"size": 8, "symbol": ["circle" if point.even else "circle-open" for point in points]},
        hovertext=[_hover(point) for point in points],
        hoverinfo="text",
        showlegend=False,
    )
    for place, point in zip(places, points, strict=True):
        if advised is not None and point.slots == advised.slots:
            figure.add_scatter(
                x=[place],
                y=[100 * point.gain],
                mode="markers+text",
                marker={"symbol": "diamond", "size": 16, "color": TEAL, "line": {"color": NEUTRAL, "width": 2}},
                text=["advised"],
                textposition="top center",
                hoverinfo="skip",
                showlegend=False,
            )
    figure.add_hline(0, line={"color": NEUTRAL, "width": 1})
    figure.update_xaxes(
        title=f"spare slots in all, per GPU, and their memory in {unit}" + "; hollow: no engine takes it" * (not all_even),
        tickvals=places,
        ticktext=[
            f"{point.spare:,}<br>{spare_per_gpu(point, points[0])}<br>{digits(point.memory_bytes / factor)}" for point in points
        ],
        showgrid=False,
        zeroline=False,
        range=[-0.5, len(points) - 0.5],
    )
    figure.update_yaxes(title=f"gain {'held out' if held_out else 'in sample'}, %", zeroline=False)
    return finish(figure, _finding(points, advised), HEIGHT)


def spare_per_gpu(point: RedundancyPoint, fewest: RedundancyPoint) -> str:
    """`+1`, or `+0 or 1` where some GPUs have one slot more."""
    most = point.slots_of_gpu - fewest.slots_of_gpu
    return f"+{most}" if point.even else f"+{most - 1} or {most}"


def _hover(point: RedundancyPoint) -> str:
    low, high = point.interval
    return (
        f"{point.slots} slots, {point.spare} of them spare<br>gain {signed(point.gain)}, {share(CONFIDENCE)} interval "
        f"{signed(low)} to {signed(high)}<br>{signed(point.gain_worst)} on the worst recording<br>{seconds(point.seconds)}, "
        f"balancedness {point.balancedness:.3f}, {point.planned_balancedness:.3f} as planned"
    )


def _finding(points: Sequence[RedundancyPoint], advised: Knee | None) -> str:
    if advised is None:
        return "So far one number of slots" if len(points) == 1 else f"So far {len(points)} numbers of slots"
    point, fewest = next(point for point in points if point.slots == advised.slots), points[0]
    if advised.rule == "noise":
        return "What spare slots gain here may as well be nothing"
    if point is fewest:
        return "No number of spare slots is worth its memory here"
    each = point.slots_of_gpu - fewest.slots_of_gpu
    slots = "1 spare slot per GPU brings" if each == 1 else f"{each} spare slots per GPU bring"
    return f"{slots} {share(point.gain)} for {size(point.memory_bytes)} on all GPUs"
