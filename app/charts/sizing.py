"""Charts of sizing: prices of clusters over the times of their plans."""

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from app.charts import theme
from engine.jobs.tasks import SizedPoint
from engine.sizing.inputs import Target, in_words
from engine.units import TIME, digits, scale_of, seconds, share

LEGEND = theme.legend_below(-0.2)


def front(
    met: Sequence[SizedPoint],
    undecided: Sequence[SizedPoint],
    target: Target,
    money: Callable[[float], str],
    complete: bool = True,
    dark: bool = False,
) -> go.Figure:
    """Price over time: the clusters that meet a target, each with its bound, the undecided ones, and the target as lines.

    money: a price in words
    complete: True if the search is over
    dark: the page's theme
    """
    met = sorted(met, key=lambda point: point.price)
    planned = [point for point in undecided if point.objective is not None]
    bare = [point for point in undecided if point.objective is None]
    times = [point.objective for point in (*met, *planned)] + [point.bound for point in bare]
    factor, unit = scale_of(max([*times, target.seconds or 0.0]), TIME)
    figure = go.Figure()
    for point in met:
        figure.add_scatter(
            x=[point.bound / factor, point.objective / factor],
            y=[point.price] * 2,
            mode="lines",
            line={"color": theme.NEUTRAL, "width": 1, "dash": "dash"},
            name="down to the bound of any plan",
            showlegend=point is met[0],
            hoverinfo="skip",
        )
    kinds = (
        ("meets the target", met, theme.TEAL, "circle", "lines+markers"),
        ("undecided, with a plan", planned, theme.SECOND, "diamond-open", "markers"),
        ("undecided, at its bound", bare, theme.NEUTRAL, "line-ns-open", "markers"),
    )
    for name, points, colour, symbol, mode in kinds:
        if points:
            figure.add_scatter(
                x=[(point.bound if point.objective is None else point.objective) / factor for point in points],
                y=[point.price for point in points],
                mode=mode,
                name=name,
                line={"color": colour, "width": 2, "shape": "vh"},
                marker={"color": colour, "size": 10, "symbol": symbol, "line": {"width": 2, "color": colour}},
                **theme.tips(_tip(point, money) for point in points),
            )
    line = {"color": theme.ink(dark), "width": 1.5, "dash": "dot"}
    if target.seconds is not None:
        note = {"text": f"target, {digits(target.seconds / factor)} {unit}", "font": {"size": theme.SMALLEST}}
        figure.add_vline(x=target.seconds / factor, line=line, annotation=note, annotation_position="top left")
    if target.price is not None:
        note = {"text": f"at most {theme.plain(money(target.price))}", "font": {"size": theme.SMALLEST}}
        figure.add_hline(y=target.price, line=line, annotation=note, annotation_position="bottom left")
    figure.update_xaxes(title=f"time, {unit} (simulated)", rangemode="tozero", showgrid=False)
    figure.update_yaxes(title="price an hour", rangemode="tozero")
    return theme.finish(figure, _answer(met, target, money, complete), 420, legend=LEGEND)


def _tip(point: SizedPoint, money: Callable[[float], str]) -> str:
    of = f"{theme.plain(in_words(point.nodes))}<br>{theme.plain(money(point.price))} an hour"
    if point.objective is None:
        return f"{of}<br>not planned: at least {seconds(point.bound)}"
    left = f"at least {seconds(point.bound)}, {share(1 - point.bound / point.objective)} left"
    return f"{of}<br>{seconds(point.objective)}; {left}"


def _answer(met: Sequence[SizedPoint], target: Target, money: Callable[[float], str], complete: bool) -> str:
    if not met:
        return "No cluster was found that meets the target" if complete else "No cluster that meets the target yet"
    first = met[-1] if target.seconds is None else met[0]
    which = "the fastest" if target.seconds is None else "the cheapest"
    said = f"{theme.plain(in_words(first.nodes))}, {theme.plain(money(first.price))} an hour: {seconds(first.objective)}"
    return f"{said}, {which} found" if complete else f"So far: {said}"
