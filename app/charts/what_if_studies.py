"""Charts of the what-if studies: a tornado, traffic noise, the number of GPUs, one parameter over a whole range, and drift."""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from app.charts import theme
from app.charts.what_if import SPANS, told
from engine.cluster import Node
from engine.compare.capacity import CapacityPoint, hardware, smallest
from engine.compare.drift import Drift, Followed
from engine.compare.imprecision import ImprecisionPoint
from engine.compare.judge import is_pass
from engine.compare.sensitivity import ANEW, CurvePoint, SensitivityPoint
from engine.serving.step import Phase
from engine.units import TIME, at_most, digits, ratio, scale_of, seconds, share, signed

STYLES = {
    "aurora": (theme.TEAL, "solid", "circle"),
    "rga": (theme.SECOND, "dash", "diamond"),
    "rcs": (theme.KIND_COLOURS["dispatch"], "dot", "square"),
    "sjf": (theme.KIND_COLOURS["gate"], "dashdot", "triangle-up"),
    "rga+rec": (theme.SECOND, "dash", "diamond"),
    "rec": (theme.KIND_COLOURS["dispatch"], "dot", "square"),
}
LEGEND = theme.legend_below(-0.2)


def tornado(
    points: Sequence[SensitivityPoint],
    total: float,
    change: float,
    complete: bool = True,
    tag: str = "simulated",
    phase: Phase | None = None,
    rate: float | None = None,
) -> go.Figure:
    """Change of the total time when a parameter is a share less or more, the most important on top.

    total, rate: seconds as things are, and tokens a second and GPU of a serving step
    change: the share
    complete: True if all points are there
    tag: source of the times, such as "simulated"
    phase: of the serving step that is timed; None: a pass or training step
    """
    ordered = sorted(points, key=lambda point: -point.reach)
    place = np.arange(len(ordered))
    figure = go.Figure()
    percent = share(change)
    for side, title, colour, pattern in (
        ("less", f"{percent} less", theme.SECOND, "/"),
        ("more", f"{percent} more", theme.TEAL, ""),
    ):
        values = np.array([getattr(point, side) for point in ordered])
        figure.add_bar(
            x=100 * (values / total - 1) if total else values,
            y=place,
            orientation="h",
            name=title,
            width=0.7,
            marker={"color": colour, "opacity": 0.85, "pattern": {"shape": pattern, "size": 6}},
            **theme.tips(
                f"{theme.plain(point.title)}, {title}<br>{seconds(value)}, {100 * (value / (total or 1) - 1):+.2f} %"
                f"{_rated(getattr(point, f'{side}_rate'))}"
                for point, value in zip(ordered, values, strict=True)
            ),
        )
    figure.add_vline(x=0, line={"width": 1, "color": theme.NEUTRAL})
    what = "total time" if phase is None else SPANS[phase]
    figure.update_xaxes(
        title=f"change of the {what}, % of {seconds(total)}{_rated(rate)} ({tag})", zeroline=False, ticksuffix=" %"
    )
    ticktext = [theme.plain(point.title) for point in ordered]
    range = [max(len(ordered), 1) - 0.4, -0.6]
    figure.update_yaxes(tickvals=place, ticktext=ticktext, showgrid=False, zeroline=False, range=range)
    height = 150 + 30 * len(ordered)
    legend = LEGEND | {"y": -62 / (height - 110)}
    title = _most_important(ordered, total, change, complete, phase, rate)
    return theme.finish(figure, title, height, barmode="overlay", legend=legend)


def _rated(rate: float | None) -> str:
    """Tokens a second of a serving step, after its time."""
    return "" if rate is None else f", {digits(rate)} tokens/s per GPU"


def _most_important(
    ordered: Sequence[SensitivityPoint], total: float, change: float, complete: bool, phase: Phase | None, rate: float | None
) -> str:
    if not ordered or not total:
        return "No points yet"
    first = ordered[0]
    which = "less" if first.less < first.more else "more"
    least, about = min(first.less, first.more), theme.plain(first.title)
    if rate:  # the gain is in tokens a second: a smaller batch takes less time and brings fewer of them
        there = getattr(first, f"{which}_rate")
        said = f"{about} counts most, {share(change)} {which}: {seconds(least)}{_rated(there)} ({signed(there / rate - 1)})"
        return told(said, complete, phase)
    title = f"{about} counts most: {share(change)} {which} saves {share(1 - least / total)} of the time"
    idle = [point.title for point in ordered if point.reach <= 1e-6 * total]
    if complete and idle:
        title += f"; {theme.plain(idle[0])} does not matter" if len(idle) == 1 else f"; {len(idle)} others do not matter"
    return told(title, complete, phase)


def imprecise_times(
    points: Sequence[ImprecisionPoint], titles: dict[str, str], complete: bool = True, phase: Phase | None = None
) -> go.Figure:
    """Time on a mixture of the planned traffic with noise, against the share of noise: the median of the draws with a band from
    the least to the most.

    titles: of the systems
    phase: of the serving step that is timed; None: a pass
    """
    factor, unit = scale_of(max((point.total for point in points), default=1.0), TIME)
    figure = go.Figure()
    for system in dict.fromkeys(point.system for point in points):
        levels, drawn = _by_level([point for point in points if point.system == system])
        across = [100 * level for level in levels]
        low, high = ([pick(totals) / factor for totals in drawn] for pick in (min, max))
        figure.add_scatter(
            x=[*across, *reversed(across)],
            y=[*high, *reversed(low)],
            fill="toself",
            mode="lines",
            line={"width": 0},
            fillcolor=theme.faint(STYLES[system][0], 0.12),
            hoverinfo="skip",
            showlegend=False,
        )
        figure.add_scatter(
            x=across,
            y=[np.median(totals) / factor for totals in drawn],
            name=theme.plain(titles[system]),
            **theme.styled(*STYLES[system]),
            **theme.tips(
                f"{theme.plain(titles[system])}, {level:.0f} % noise<br>median {seconds(float(np.median(totals)))}, from "
                f"{seconds(min(totals))} to {seconds(max(totals))} in {len(totals)} draw{'s' if len(totals) > 1 else ''}"
                for level, totals in zip(across, drawn, strict=True)
            ),
        )
    _noise_axis(figure, points)
    figure.update_yaxes(title=f"{SPANS[phase]} on the mixture, {unit} (simulated)", rangemode="tozero")
    return theme.finish(figure, _loss(points, complete, phase), 400, legend=LEGEND)


def _loss(points: Sequence[ImprecisionPoint], complete: bool, phase: Phase | None) -> str:
    levels, drawn = _by_level([point for point in points if point.system == "aurora"])
    if not levels:
        return "No points yet"
    if len(levels) < 2 or levels[0] > 0:
        where = f"'s plan takes {{}} at {share(levels[-1])} noise" if complete else " takes {}"
        return told("Aurora" + where.format(seconds(float(np.median(drawn[-1])))), complete, phase)
    loss = np.median(drawn[-1]) / np.median(drawn[0]) - 1
    finding = f"at {share(levels[-1])} noise Aurora's plan takes {share(abs(loss))} {'longer' if loss >= 0 else 'less'}"
    return told(finding, complete, phase)


def speed_ups(points: Sequence[ImprecisionPoint], titles: dict[str, str]) -> go.Figure:
    """Time of every baseline over Aurora's at the same noise and draw (Aurora, Figure 14): the median."""
    aurora = {(point.level, point.seed): point.total for point in points if point.system == "aurora"}
    figure, worst = go.Figure(), []
    for system in dict.fromkeys(point.system for point in points if point.system != "aurora"):
        ratios = [
            ImprecisionPoint(system, point.level, point.seed, point.total / aurora[point.level, point.seed])
            for point in points
            if point.system == system and aurora.get((point.level, point.seed))
        ]
        levels, drawn = _by_level(ratios)
        median = [float(np.median(totals)) for totals in drawn]
        worst += [(value, titles[system], level) for value, level in zip(median, levels, strict=True)]
        figure.add_scatter(
            x=[100 * level for level in levels],
            y=median,
            name=f"over {theme.plain(titles[system])}",
            **theme.styled(*STYLES[system]),
            hovertemplate=f"{theme.plain(titles[system])} takes %{{y:.2f}}× as long at %{{x:.0f}} % noise<extra></extra>",
        )
    figure.add_hline(y=1, line={"width": 1, "dash": "dot", "color": theme.NEUTRAL})
    _noise_axis(figure, points)
    figure.update_yaxes(title="time / Aurora's time", ticksuffix="×")
    title = "No points yet"
    if worst:
        least, name, level = min(worst)
        title = (
            f"Aurora gains {signed(least - 1)} or more"
            if least >= 1
            else (f"Aurora loses to {theme.plain(name.split(' (')[0])} at {share(level)} noise: {signed(least - 1)}")
        )
    return theme.finish(figure, title, 400, legend=LEGEND)


def _noise_axis(figure: go.Figure, points: Sequence[ImprecisionPoint]) -> None:
    values = sorted({100 * point.level for point in points})
    figure.update_xaxes(
        title="noise in the traffic to come; plans were made without noise",
        showgrid=False,
        tickvals=values,
        ticktext=[f"{level:g} %" for level in values],
    )


def _by_level(points: Sequence[ImprecisionPoint]) -> tuple[list[float], list[list[float]]]:
    """Levels, ascending, and the totals of all draws at each."""
    levels = sorted({point.level for point in points})
    return levels, [[point.total for point in points if point.level == level] for level in levels]


def capacity(
    points: Sequence[CapacityPoint],
    target: float,
    part: Sequence[Node],
    complete: bool = True,
    price: float | None = None,
    dark: bool = False,
) -> go.Figure:
    """Time against cost: the front of the sizes that are faster than every smaller one, the bound below it, the target as a
    line, and the smallest size that meets it.

    part: nodes that every size repeats
    price: of a part for an hour in the person's own currency, for cost per hour instead of the number of GPUs
    dark: the page's theme
    """
    planned = sorted((point for point in points if point.total is not None), key=lambda point: point.gpus)
    factor, unit = scale_of(max([target, *(point.total for point in planned)]), TIME)
    fewest = smallest(points, target)
    best = np.minimum.accumulate([math.inf, *(point.total for point in planned)])
    front = [point for point, before in zip(planned, best, strict=False) if point.total < before]
    behind = [point for point in planned if point not in front]
    figure = go.Figure()
    _add_sizes(figure, "front: no smaller size is as fast", front, target, price, factor, theme.TEAL, "lines+markers")
    _add_sizes(figure, "slower than a smaller size", behind, target, price, factor, theme.NEUTRAL, "markers")
    _add_bound(figure, planned, factor, unit, price)
    refused = [point for point in points if point.total is None]
    if refused:
        figure.add_scatter(
            x=[_across(point, price) for point in refused],
            y=[target / factor] * len(refused),
            mode="markers",
            name="cannot be planned",
            marker={"symbol": "x", "size": 10, "color": theme.SECOND},
            text=[f"{point.gpus} GPUs: cannot be planned" for point in refused],
            hovertemplate="%{text}<extra></extra>",
        )
    line = {"color": theme.ink(dark), "width": 1.5, "dash": "dot"}
    annotation = {"text": f"target, {digits(target / factor)} {unit}", "font": {"size": theme.SMALLEST}}
    figure.add_hline(y=target / factor, line=line, annotation=annotation, annotation_position="bottom left")
    if fewest is not None:
        figure.add_annotation(
            x=_across(fewest, price),
            y=fewest.total / factor,
            text=f"<b>{fewest.gpus} GPUs</b>{_priced(fewest, price)}",
            showarrow=False,
            xanchor="left",  # next to the step that leads down to it
            yanchor="bottom",
            xshift=6,
            yshift=4,
        )
    across = "GPUs" if price is None else "cost per hour"
    figure.update_xaxes(title=across, rangemode="tozero", showgrid=False)
    figure.update_yaxes(title=f"time, {unit} (simulated)", rangemode="tozero")
    return theme.finish(figure, _answer(points, fewest, target, part, complete, price), 420, legend=LEGEND)


def _add_sizes(
    figure: go.Figure,
    name: str,
    sizes: list[CapacityPoint],
    target: float,
    price: float | None,
    factor: float,
    colour: str,
    mode: str,
) -> None:
    """Draw planned sizes, those that meet the target filled. factor: seconds of the time axis's unit; mode: of `go.Scatter`."""
    figure.add_scatter(
        x=[_across(point, price) for point in sizes],
        y=[point.total / factor for point in sizes],
        mode=mode,
        name=name,
        line={"color": colour, "width": 2, "shape": "hv"},
        marker={
            "size": 10,
            "symbol": ["circle" if point.meets(target) else "circle-open" for point in sizes],
            "line": {"width": 2},
        },
        **theme.tips(
            f"{point.gpus} GPUs{_priced(point, price)}: {seconds(point.total)}, "
            f"{'meets' if point.meets(target) else 'misses'} the target"
            for point in sizes
        ),
    )


def _priced(point: CapacityPoint, price: float | None) -> str:
    return "" if price is None else f", cost {digits(price * point.parts)} per hour"


def _across(point: CapacityPoint, price: float | None) -> float:
    """Place of a size on the axis: its cost per hour, or its GPUs if no price of a part is known."""
    return float(point.gpus) if price is None else price * point.parts


def _add_bound(figure: go.Figure, planned: Sequence[CapacityPoint], factor: float, unit: str, price: float | None) -> None:
    """Draw the bound that no placement of the kind can beat, at the sizes for which it is proven."""
    proven = [point for point in planned if point.scope == "placement and order" and point.bound is not None]
    figure.add_scatter(
        x=[_across(point, price) for point in proven],
        y=[point.bound / factor for point in proven],
        customdata=[point.gpus for point in proven],
        mode="lines",
        name="lower bound (any placement, any order)",
        line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"},
        hovertemplate=f"%{{customdata}} GPUs: bound %{{y:.3g}} {unit}<extra></extra>",
    )


def _answer(
    points: Sequence[CapacityPoint],
    fewest: CapacityPoint | None,
    target: float,
    part: Sequence[Node],
    complete: bool,
    price: float | None,
) -> str:
    if fewest is not None:
        enough = f"{_hardware(part, fewest)} are enough for {seconds(target)}"
        return f"{enough}: {seconds(fewest.total)}{_priced(fewest, price)}"
    planned = [point for point in points if point.total is not None]
    if not complete:
        return f"So far: up to {_hardware(part, points[-1])} miss the target" if points else "No points yet"
    if not planned:
        return "No size could be planned for"
    best = min(planned, key=lambda point: point.total)
    return f"No size tried meets {seconds(target)}; the best, {_hardware(part, best)}, takes {seconds(best.total)}"


def _hardware(part: Sequence[Node], point: CapacityPoint) -> str:
    """A size by its GPUs; many types by their number, since a title is one line."""
    types = {gpu.type for node in part for gpu in node.gpus}
    return f"{point.gpus} GPUs of {len(types)} types" if len(types) > 2 else theme.plain(hardware(part, point.parts))


CURVE_STYLES = ((theme.TEAL, "solid", "circle"), (theme.SECOND, "dash", "diamond"), (theme.NEUTRAL, "dot", "square"))
AXES = {
    "network": "network bandwidth, × today's",
    "compute": "computation speed, × today's",
    "latency": "latency, × today's",
    "contention": "contention: how much longer a byte takes for every further send at a port",
    "tokens": "tokens, × today's",
    "width": "model width, × today's",
    "noise": "share of traffic that is noise",
}

SHARES = ("contention", "noise")
"""Parameters that are changed by a share, not by a factor."""


def curve(
    points: Sequence[CurvePoint],
    field: str,
    series: Sequence[str],
    complete: bool = True,
    tag: str = "simulated",
    phase: Phase | None = None,
) -> go.Figure:
    """Time against the changed value, a line for every plan as it is and one for plans made for each value.

    series: names of the plans, the open one first
    tag: source of the times
    phase: of the serving step that is timed; None: a pass or training step
    """
    factor, unit = scale_of(max((point.total for point in points if point.total is not None), default=1.0), TIME)
    values = sorted({point.value for point in points})
    ratios = field not in SHARES
    log = ratios and min(values, default=0.0) > 0
    figure = go.Figure()
    for turn, name in enumerate([*series, ANEW]):
        points_of_plan = [point for point in points if point.series == name and point.total is not None]
        if not points_of_plan:
            continue
        figure.add_scatter(
            x=[point.value for point in points_of_plan],
            y=[point.total / factor for point in points_of_plan],
            name=theme.plain(name),
            **theme.styled(*CURVE_STYLES[min(turn, 2) if name != ANEW else 2]),
            **theme.tips(
                f"{theme.plain(name)}<br>{_value(point.value, ratios)}: {seconds(point.total)}{_rated(point.rate)}"
                for point in points_of_plan
            ),
        )
    ends = np.log10([values[0], values[-1]]) if log and values else None
    figure.update_xaxes(
        title="batch, × today's" if phase and field == "tokens" else AXES[field],
        type="log" if log else "linear",
        tickvals=values,
        showgrid=False,
        ticktext=[_value(value, ratios) for value in values],
        range=None if ends is None else [ends[0] - 0.05, ends[1] + 0.05],
    )
    figure.update_yaxes(title=f"{SPANS[phase]}, {unit} ({tag})")
    figure.update_yaxes({"type": "log", "dtick": "D2"} if log else {"rangemode": "tozero"})
    return theme.finish(figure, _course(points, series, ratios, complete, phase), 420, legend=LEGEND)


def _value(value: float, ratios: bool) -> str:
    return ratio(value) if ratios else f"{100 * value:g} %"


def _course(points: Sequence[CurvePoint], series: Sequence[str], ratios: bool, complete: bool, phase: Phase | None) -> str:
    """The course of the first plan compared with a plan made for each value, or else with the second."""
    totals = {
        name: {point.value: point.total for point in points if point.series == name and point.total} for name in (*series, ANEW)
    }
    own = totals[series[0]]
    sentence = ""
    if anew := {value: own[value] / total for value, total in totals[ANEW].items() if value in own}:
        worst = max(anew, key=anew.get)
        sentence = f"keeping {theme.plain(series[0])} costs {at_most(max(anew[worst] - 1, 0))} (at {_value(worst, ratios)})"
    elif len(series) > 1:
        other = {value: total / own[value] for value, total in totals[series[1]].items() if value in own}
        behind = [value for value, relative in other.items() if relative < 1]
        name = theme.plain(series[1].split(" (")[0])
        if behind:
            sentence = f"{name} is faster at {_value(behind[0], ratios)}"
            sentence += f" and {len(behind) - 1} more values" if len(behind) > 1 else ""
        elif other:
            stretch = " to ".join(
                dict.fromkeys(signed(relative - 1) for relative in (min(other.values()), max(other.values())))
            )
            sentence = f"{theme.plain(series[0])} gains {stretch} over {name}"
    if not sentence:
        if not own:
            return "No points yet"
        sentence, complete = f"{theme.plain(series[0])} takes {seconds(min(own.values()))} at best", True
    return told(sentence, complete, phase)


POLICIES = {
    "never": (theme.NEUTRAL, "dash", "circle"),
    "every": (theme.SECOND, "solid", "diamond"),
    "worse": (theme.TEAL, "solid", "square"),
    "pays": (theme.KIND_COLOURS["dispatch"], "solid", "triangle-up"),
}
"""Styles by the rule of a policy."""


def drifting(answer: Drift) -> go.Figure:
    """Time of every window under the fastest policy of each rule, with a mark where it moves, and the limit below them all."""
    best_of: dict[str, Followed] = {}
    for policy in answer.policies:
        best_of.setdefault(policy.rule, policy)
    factor, unit = scale_of(answer.passes * max(window.deployed for window in answer.windows), TIME)
    names, figure = [theme.plain(window.name) for window in answer.windows], go.Figure()
    windows = [place + 2 for place in range(len(names))]
    for policy in best_of.values():
        colour, dash, symbol = POLICIES[policy.rule]
        moved = {move.window: move for move in policy.moves}
        told = [
            f"{theme.plain(policy.name)}<br>{name}: {seconds(time)}"
            + (
                f"<br>after a move of {moved[place].copies:,} copies in {seconds(moved[place].seconds)}"
                if place in moved
                else ""
            )
            for place, (name, time) in enumerate(zip(names, policy.seconds, strict=True))
        ]
        figure.add_scatter(
            x=windows,
            y=[time / factor for time in policy.seconds],
            name=theme.plain(policy.name.split(",")[0]),
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2},
            marker={"symbol": symbol, "color": colour, "size": [10 if place in moved else 0 for place in range(len(names))]},
            **theme.tips(told),
        )
    limit = [answer.passes * window.limit for window in answer.windows]
    figure.add_scatter(
        x=windows,
        y=[time / factor for time in limit],
        name="limit of these plans",
        mode="lines",
        line={"color": theme.NEUTRAL, "dash": "dot"},
        **theme.tips(f"limit<br>{name}: {seconds(time)}" for name, time in zip(names, limit, strict=True)),
    )
    figure.update_xaxes(title="window, in order of time; a mark: a move at its start", dtick=max(1, len(names) // 16))
    figure.update_yaxes(title=f"time of {answer.passes:,} {'passes' if is_pass(answer.unit) else 'steps'}, {unit} (simulated)")
    best, never = answer.policies[0], answer.never
    saved = share(1 - best.total / never.total if never.total else 0.0)
    title = "Never moving is best" if best is never else f"Best: {best.name.split(',')[0]}; saves {saved}, moves included"
    return theme.finish(
        figure, title if len(names) == answer.of else f"So far: {title[0].lower()}{title[1:]}", 380, legend=LEGEND
    )
