"""Charts of a sweep, the time of a training step against one parameter of its plan, and of a synthetic workload."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import plotly.graph_objects as go

from app.charts.theme import NEUTRAL, PARTS, SECOND, SEQUENTIAL, SMALLEST, TEAL, finish, legend_below, plain
from engine.compare.sweep import Kind, SweepPoint, best_of
from engine.units import TIME, digits, ratio, scale_of, seconds, share

What = Literal["total", "forward"]

AXES = {
    "micro_op": "micro-op size, MB",
    "degree": "pipeline degree of every MoE layer",
    "range": "most operators in a range (not to scale)",
}
SHORT = {"micro_op": "{:g} MB", "degree": "{:g}", "range": "ranges up to {:g}"}
WHATS = {"total": "step time", "forward": "forward pass"}
STYLES = ((TEAL, "solid", "circle"), (SECOND, "dash", "diamond"), (NEUTRAL, "dashdot", "square"))
LEGEND = legend_below(-0.17)
EQUAL = 1e-3
"""Times that differ by no more than this part are equally good."""
CLOSE = 0.06
"""Lines nearer to each other than this part of the shown range share one label."""


def times(points: Sequence[SweepPoint], kind: Kind, what: What = "total", complete: bool = True) -> go.Figure:
    """Time against the value, one line for each series; the best point marked, references and the bound as named lines.

    what: the whole step, or its forward pass, which has no bound of its own
    complete: True if all points are there
    """
    swept = [point for point in points if point.value is not None]
    factor, unit = scale_of(max((getattr(point, what) for point in points), default=1.0), TIME)
    place = _places(swept, kind)
    figure = go.Figure()
    for turn, series in enumerate(series_of(points)):
        points_of_series = [point for point in swept if point.series == series]
        colour, dash, symbol = STYLES[turn % len(STYLES)]
        figure.add_scatter(
            x=[place[point.value] for point in points_of_series],
            y=[getattr(point, what) / factor for point in points_of_series],
            name=plain(series),
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2},
            marker={"color": colour, "symbol": f"{symbol}-open", "size": 8},
            text=[_hover(point, kind) for point in points_of_series],
            hovertemplate="%{text}<extra></extra>",
        )
    best = best_of(points, what)
    if best is not None:
        figure.add_scatter(
            x=[place[best.value]],
            y=[getattr(best, what) / factor],
            mode="markers+text",
            showlegend=False,
            hoverinfo="skip",
            marker={"symbol": "star", "size": 16, "color": SECOND},
            text=[f"<b>{seconds(getattr(best, what))}</b>"],
            textposition="bottom center",
            cliponaxis=False,
        )
    lines = {plain(point.series): getattr(point, what) / factor for point in points if point.value is None}
    shown = [getattr(point, what) for point in points]
    if what == "total":
        _add_bound(figure, swept, place, factor, unit)
        shown += [point.bound for point in swept]
    reach = (max(shown) - min(shown)) / factor if shown else 0.0
    _add_references(figure, lines, reach, best and getattr(best, what) / factor, unit)
    _finish_x(figure, place, kind)
    figure.update_yaxes(title=f"{WHATS[what]}, {unit} (simulated)")
    return finish(figure, title(points, kind, what, complete), 440, legend=LEGEND)


def decomposition(points: Sequence[SweepPoint], kind: Kind, series: str) -> go.Figure:
    """The parts of the step time of one series, stacked."""
    points_of_series = [point for point in points if point.series == series and point.value is not None]
    factor, unit = scale_of(max((point.total for point in points_of_series), default=1.0), TIME)
    place = _places(points_of_series, kind)
    figure = go.Figure()
    for part in ("communication", "overlapped", "computation", "idle"):
        name, colour, pattern = PARTS[part]
        values = [point.decomposition[part] for point in points_of_series]
        if not any(values):
            continue
        figure.add_scatter(
            x=[place[point.value] for point in points_of_series],
            y=[value / factor for value in values],
            name=name,
            stackgroup="time",
            mode="lines",
            line={"color": colour, "width": 1},
            fillcolor=colour,
            fillpattern={"shape": pattern, "fillmode": "overlay", "fgcolor": "#16201F", "size": 6, "solidity": 0.25},
            text=[
                f"{label(kind, point.value)}<br>{name}: {seconds(value)}, {share(value / point.total)} of the step"
                for point, value in zip(points_of_series, values, strict=True)
            ],
            hovertemplate="%{text}<extra></extra>",
        )
    _finish_x(figure, place, kind)
    figure.update_yaxes(title=f"step time, {unit} (simulated)", rangemode="tozero")
    return finish(figure, _exposed_title(points_of_series, kind), 440, legend=LEGEND)


def series_of(points: Sequence[SweepPoint]) -> list[str]:
    """The series that have points, in the order in which they came."""
    return list(dict.fromkeys(point.series for point in points if point.value is not None))


def label(kind: Kind, value: float) -> str:
    """A value in words: `30 MB micro-ops`."""
    if kind == "micro_op":
        return f"{value:g} MB micro-ops"
    if kind == "degree":
        return f"degree {value:g}"
    return f"ranges up to {value:g} operators" if value else "no partition"


def title(points: Sequence[SweepPoint], kind: Kind, what: What = "total", complete: bool = True) -> str:
    """The finding: the best value, and the reference that beats it, or else the loss at the worst value."""
    best = best_of(points, what)
    if best is None:
        return "No points yet"
    least = getattr(best, what)
    points_of_series = [point for point in points if point.value is not None and point.series == best.series]
    worst = max(points_of_series, key=lambda point: getattr(point, what))
    loss = getattr(worst, what) / least - 1
    if len(points_of_series) > 1 and loss <= EQUAL:
        finding = f"every value takes {seconds(least)}"
    else:
        equal = [point.value for point in points_of_series if getattr(point, what) <= least * (1 + EQUAL)]
        finding = f"{_best_in_words(kind, best.value, equal)} best: {seconds(least)}"
    rival = min((point for point in points if point.value is None), key=lambda point: getattr(point, what), default=None)
    if rival is not None and getattr(rival, what) < least * (1 - EQUAL):
        finding += f", but {seconds(getattr(rival, what))} with {rival.series}"
    elif loss > EQUAL:
        cost = "costs" if _singular(kind, worst.value) else "cost"
        finding += f"; {SHORT[kind].format(worst.value) if worst.value else 'none'} {cost} {share(loss)} more"
    return plain(f"So far: {finding}" if not complete else finding[0].upper() + finding[1:])


def _singular(kind: Kind, value: float) -> bool:
    return kind == "degree" or not value


def _best_in_words(kind: Kind, best: float, equal: list[float]) -> str:
    """The best value; of micro-ops and degrees all values that are as good."""
    low, high = min(equal), max(equal)
    if kind == "range" or low == high:
        return f"{label(kind, best)} {'is' if _singular(kind, best) else 'are'}"
    return f"{low:g} to {high:g} MB micro-ops are" if kind == "micro_op" else f"degrees {low:g} to {high:g} are"


def _exposed_title(points: Sequence[SweepPoint], kind: Kind) -> str:
    if not points:
        return "No points yet"
    least = min(points, key=lambda point: point.decomposition["communication"])
    return f"Least exposed: {seconds(least.decomposition['communication'])} with {label(kind, least.value)}"


def _places(points: Sequence[SweepPoint], kind: Kind) -> dict[float, float]:
    """Place of every value on the axis: itself, or in a row for ranges, since their interesting lengths are the short ones."""
    values = sorted({point.value for point in points})
    return dict(zip(values, range(len(values)) if kind == "range" else values, strict=True))


def _finish_x(figure: go.Figure, place: dict[float, float], kind: Kind) -> None:
    values = list(place)
    figure.update_xaxes(title=AXES[kind], showgrid=False)
    if not values:
        return
    if kind == "micro_op":
        shown = _apart(values)
        low, high = np.log10(values[0]), np.log10(values[-1])
        room = 0.04 * max(high - low, 1.0)
        figure.update_xaxes(
            type="log", tickvals=shown, ticktext=[f"{value:g}" for value in shown], range=[low - room, high + room]
        )
        return
    room = 0.04 * max(len(values) if kind == "range" else values[-1] - values[0], 1.0) + 0.2
    ends = [min(place.values()) - room, max(place.values()) + room]
    figure.update_xaxes(range=ends)
    if kind == "range":
        text = ["none" if not value else f"{value:g}" for value in values]
        figure.update_xaxes(tickvals=list(place.values()), ticktext=text)
    elif values[-1] - values[0] <= 16:
        figure.update_xaxes(tickvals=values, ticktext=[f"{value:g}" for value in values])


def _apart(values: list[float]) -> list[float]:
    """The values with labels that do not run into each other on a logarithmic axis, the last one among them."""
    room = 0.045 * max(np.log10(values[-1] / values[0]), 0.5)
    shown = [values[-1]]
    for value in reversed(values[:-1]):
        if np.log10(shown[0] / value) >= room:
            shown.insert(0, value)
    return shown


def _add_bound(figure: go.Figure, points: Sequence[SweepPoint], place: dict[float, float], factor: float, unit: str) -> None:
    """Draw the proven bound of every value's placement, the least if series differ."""
    bounds = {value: min(point.bound for point in points if point.value == value) / factor for value in place}
    if not bounds:
        return
    figure.add_scatter(
        x=[place[value] for value in bounds],
        y=list(bounds.values()),
        mode="lines",
        showlegend=False,
        line={"color": NEUTRAL, "width": 1, "dash": "dash"},
        hovertemplate=f"bound: %{{y:.3f}} {unit}<extra></extra>",
    )
    last = bounds[max(bounds)]
    figure.add_annotation(
        xref="x domain",
        x=1,
        y=last,
        text=f"bound, {digits(last)} {unit}",
        showarrow=False,
        xanchor="right",
        yanchor="bottom",
        font={"size": SMALLEST},
    )


def _add_references(figure: go.Figure, lines: dict[str, float], reach: float, best: float | None, unit: str) -> None:
    """Draw a line with its name and value for every reference; of lines that nearly coincide one carries all names.

    Names stand on the side away from the best point, which has its own number there.
    reach: the least and the most that is shown
    """
    together: list[list[str]] = []
    for name in sorted(lines, key=lines.get):
        if together and lines[name] - lines[together[-1][0]] <= CLOSE * reach:
            together[-1].append(name)
        else:
            together.append([name])
    for names in together:
        below = best is not None and lines[names[0]] <= best * (1 + EQUAL)
        carrier = names[0] if below else names[-1]
        for name in names:
            text = (
                " · ".join(f"{reference}, {digits(lines[reference])} {unit}" for reference in names) if name == carrier else ""
            )
            figure.add_hline(
                y=lines[name],
                line={"dash": "dot", "width": 1.5, "color": NEUTRAL},
                annotation={"text": text, "font": {"size": SMALLEST}},
                annotation_position="bottom right" if below else "top right",
            )


def _hover(point: SweepPoint, kind: Kind) -> str:
    exposed = point.decomposition["communication"]
    packed = f"<br>{point.experts_per_gpu} experts on a GPU, {point.pieces:,} all-reduces" if kind == "micro_op" else ""
    return (
        f"{label(kind, point.value)}, {plain(point.series)}<br>step {1e3 * point.total:.3f} ms, "
        f"{share(point.total / point.bound - 1)} above the bound<br>forward pass {1e3 * point.forward:.3f} ms<br>"
        f"{1e3 * exposed:.3f} ms of communication exposed{packed}"
    )


MOST_WHISKERS = 64
"""Most experts with room for whiskers."""


def popularity(load: np.ndarray, ranked: bool = True) -> go.Figure:
    """Share of token copies of every expert: the mean over the layers and the spread between them.

    load: float64[layer, expert]
    ranked: True sorts the most popular first in each layer, else by the experts' own numbers
    """
    shares = 100 * load / np.maximum(load.sum(axis=1, keepdims=True), 1)
    shown = -np.sort(-shares, axis=1) if ranked else shares
    mean = shown.mean(axis=0)
    figure = go.Figure()
    figure.add_bar(
        x=np.arange(load.shape[1]) + ranked,
        y=mean,
        marker={"color": TEAL},
        name="share",
        error_y={
            "array": shown.max(axis=0) - mean,
            "arrayminus": mean - shown.min(axis=0),
            "type": "data",
            "thickness": 1,
            "width": 2,
            "color": NEUTRAL,
        }
        if load.shape[1] <= MOST_WHISKERS
        else None,
        hovertemplate=f"{'rank' if ranked else 'expert'} %{{x}}: %{{y:.2f}} % of the copies<extra></extra>",
    )
    even = 100 / load.shape[1]
    figure.add_hline(y=even, line={"dash": "dot", "width": 1, "color": NEUTRAL})
    figure.update_xaxes(title="expert, by popularity in its layer" if ranked else "expert", showgrid=False)
    figure.update_yaxes(title="token copies, %", rangemode="tozero")
    return finish(figure, f"The most popular expert gets {ratio(mean.max() / even)} the mean", 300, showlegend=False)


def steps(load: np.ndarray) -> go.Figure:
    """Share of the token copies of a step that every expert gets, the sum of its layers. load: float64[step, expert]."""
    shares = 100 * load / np.maximum(load.sum(axis=1, keepdims=True), 1)
    hovertemplate = "step %{y}, expert %{x}: %{z:.2f} % of the copies<extra></extra>"
    colorbar = {"title": "copies, %"}
    figure = go.Figure().add_heatmap(z=shares, colorscale=SEQUENTIAL, zmin=0, colorbar=colorbar, hovertemplate=hovertemplate)
    figure.update_xaxes(title="expert")
    figure.update_yaxes(title="step", autorange="reversed")
    most = ratio(float(shares.max()) * load.shape[1] / 100)
    return finish(figure, f"In its step the most popular expert gets {most} the mean", 300)
