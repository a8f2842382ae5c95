"""Charts of sizing: prices of clusters over the times of their plans, and of deployments over their speed."""

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from app.charts import theme
from app.charts.ranked import BAR, BELOW, ROW, TIMES
from engine.jobs.tasks import SizedPoint
from engine.sizing.deployments import Point
from engine.sizing.inputs import ServingTarget, Target, in_words
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


SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "pentagon",
    "hexagon",
    "star",
    "cross",
    "triangle-down",
    "x",
    "bowtie",
    "hourglass",
)
SMALL = 0.01
"""Share of a token below which parts are shown as one."""


def deployments(
    points: Sequence[Point], target: ServingTarget, currency: str, complete: bool = True, dark: bool = False
) -> go.Figure:
    """Price over tokens/s of a user: the front of each GPU type, filled where no other type is cheaper and as fast.

    complete: True if the search is over
    dark: the page's theme
    """
    hour, figure = target.in_all, go.Figure()
    for symbol, gpu in zip(SYMBOLS, dict.fromkeys(sorted(point.deployment.gpu for point in points)), strict=False):
        own = [point for point in points if point.deployment.gpu == gpu]
        colour = theme.gpu_colour(gpu)
        speed = [1 / point.token for point in own]
        figure.add_scatter(
            x=speed,
            y=[point.hour if hour else point.million for point in own],
            error_x={
                "array": [(1 / point.low - at) * point.best for point, at in zip(own, speed, strict=True)],
                "arrayminus": [(at - 1 / point.high) * point.best for point, at in zip(own, speed, strict=True)],
                "color": theme.faint(theme.NEUTRAL, 0.35),
                "thickness": 1,
                "width": 0,
            },
            mode="lines+markers",
            name=theme.plain(gpu),
            line={"color": colour, "width": 2, "dash": "dot"},
            marker={
                "symbol": [symbol if point.best else f"{symbol}-open" for point in own],
                "size": 10,
                "color": [colour if point.best else theme.ink(dark) for point in own],
                "line": {"width": 1, "color": theme.ink(dark)},
            },
            **theme.tips(f"{theme.plain(point.in_words)}<br>{theme.plain(point.cost(hour, currency))}" for point in own),
        )
    line = {"color": theme.ink(dark), "width": 1.5, "dash": "dot"}
    if target.token is not None:
        note = {"text": f"target, {seconds(target.token)} a token", "font": {"size": theme.SMALLEST}}
        figure.add_vline(x=1 / target.token, line=line, annotation=note, annotation_position="top right")
    figure.update_xaxes(title="tokens/s of a user (predicted; lines: 9 of 10 measured)", rangemode="tozero", showgrid=False)
    figure.update_yaxes(title="price an hour" if hour else "price of a million tokens", type="log", dtick="D2")
    best = next((point for point in points if point.best), points[0])
    gpus = f"{best.gpus} × {theme.plain(best.deployment.gpu)}"
    said = f"{gpus}, {theme.plain(best.cost(hour, currency))}: {digits(1 / best.token)} tokens/s of a user"
    return theme.finish(figure, f"{said}, the cheapest" if complete else f"So far: {said}", 440, legend=LEGEND)


def parts(point: Point, dark: bool = False) -> go.Figure:
    """The parts of a token's time, the longest first, each from where the one before ends."""
    shown = sorted(
        ((name, spent) for name, spent in point.parts.items() if spent >= SMALL * point.token), key=lambda part: -part[1]
    )
    rest = point.token - sum(spent for _, spent in shown)
    rows = [*shown, *([("others", rest)] if rest > SMALL**2 * point.token else []), ("a token", point.token)]
    factor, unit = scale_of(point.token, TIME)
    figure, notes, base = go.Figure(), [], 0.0
    font = {"size": theme.SMALLEST, "color": theme.ink(dark)}
    right = {"x": 1, "xref": "paper", "xanchor": "left", "showarrow": False, "font": font}
    for place, (name, spent) in enumerate(rows):
        whole = name == "a token"
        figure.add_bar(
            x=[spent / factor],
            y=[place + BELOW],
            base=[0 if whole else base / factor],
            orientation="h",
            width=BAR,
            marker={"color": theme.NEUTRAL if whole else theme.TEAL},
            showlegend=False,
            **theme.tips([f"{name}: {seconds(spent)}, {share(spent / point.token)}"]),
        )
        base += spent
        notes.append(theme.name_above_bar(name, place + BELOW - BAR / 2, dark))
        notes.append(right | {"y": place + BELOW, "text": f" {seconds(spent)}"})
    first, most = rows[0]
    title = f"{first[:1].upper()}{first[1:]}: {share(most / point.token)} of the {seconds(point.token)} of a token"
    layout = {
        "xaxis": {"title": f"time, {unit} (predicted)", "range": [0, point.token / factor * 1.02]},
        "yaxis": {"range": [len(rows) - 0.4, -0.6], "visible": False},
        "margin": {"r": TIMES},
        "annotations": notes,
    }
    return theme.finish(figure, title, 100 + ROW * len(rows), barmode="overlay", **layout)
