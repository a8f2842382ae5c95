"""Figures and tables of the papers: our values as bars, lines or points, the published ones as hollow marks."""

from collections.abc import Mapping, Sequence
from textwrap import wrap

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.charts.series import Series, series_of
from app.charts.theme import LINE, SMALLEST, finish, ink, legend_at_foot, legend_lines, plain, tips
from engine.reproduce.exhibits import Chart
from engine.units import digits

PUBLISHED = "The paper"
HEIGHT, FOOT = 360, 36
ALONG_Y, LONGEST = 34, 26
"""Letters of a line of a title along the y axis, and of the name of a bar that stands."""
BAR, AROUND = 14, 130
"""Pixels of a bar that lies, and of all around them."""

Row = Mapping[str, str | int | float | None]


def exhibit(title: str, rows: Sequence[Row], chart: Chart, dark: bool = False) -> go.Figure:
    """The chart of an exhibit, with a panel for each value of its facet.

    title: states what is shown
    dark: the page's theme
    """
    facets = list(dict.fromkeys(row[chart.facet] for row in rows)) if chart.facet else [None]
    series = series_of([row[chart.series] for row in rows] if chart.series else [None])
    titles = [plain(str(facet)) for facet in facets] if chart.facet else None
    figure = make_subplots(1, len(facets), subplot_titles=titles, shared_yaxes=len(facets) > 1, horizontal_spacing=0.03)
    lying, height = _lies(rows, chart), HEIGHT
    for column, facet in enumerate(facets, 1):
        for each in series:
            _add(figure, _own(rows, chart, facet, each.value), chart, lying, each, column == 1, column)
        if chart.published:
            _add_published(figure, rows, chart, lying, facet, series, column, dark)
    if lying:
        figure.update_xaxes(title=plain(chart.y_title), rangemode="tozero")
        figure.update_yaxes(type="category", autorange="reversed", automargin=True)
        height = max(HEIGHT, AROUND + BAR * (len(series) + 1) * len({row[chart.x] for row in rows}))
    else:
        kind = "category" if chart.kind == "bars" else "log" if chart.log_x else None
        figure.update_xaxes(title=plain(chart.x_title), type=kind)
        figure.update_yaxes(rangemode="tozero")
        figure.update_yaxes(title="<br>".join(map(plain, wrap(chart.y_title, ALONG_Y))), col=1)
    several = len(series) > 1 or bool(chart.published)
    layout = {"showlegend": several, "legend": legend_at_foot()}
    if chart.kind == "bars":  # published marks stand on the bars of their series; points of lines stay at their x
        layout |= {"barmode": "group", "scattermode": "group"}
    lines = legend_lines([*map(_title, series), *[PUBLISHED] * bool(chart.published)]) if several else 0
    finish(figure, plain(title), height + LINE * max(lines - 1, 0), top=44 + 24 * bool(chart.facet), **layout)
    figure.layout.margin.b = FOOT + LINE * lines if several else 8
    for annotation in figure.layout.annotations:
        annotation.font.size = SMALLEST + 1
    return figure


def _add(figure: go.Figure, rows: Sequence[Row], chart: Chart, lying: bool, look: Series, legend: bool, column: int) -> None:
    x, y, name = [row[chart.x] for row in rows], [row[chart.y] for row in rows], _title(look)
    said = tips(f"{name}<br>{plain(str(at))}: <b>{_number(value)}</b>" for at, value in zip(x, y, strict=True))
    common = {"x": x, "y": y, "name": name, "legendgroup": name, "showlegend": legend, **said}
    if chart.kind == "bars":
        if lying:
            common |= {"x": y, "y": x, "orientation": "h"}
        pattern = {"shape": look.pattern, "fgcolor": "#16201F", "size": 6, "solidity": 0.25, "fillmode": "overlay"}
        figure.add_bar(**common, offsetgroup=name, marker={"color": look.colour, "pattern": pattern}, row=1, col=column)
        return
    line = {"color": look.colour, "dash": look.dash, "width": 2}
    if chart.kind == "steps":
        line["shape"] = "hv"
    mode = "markers" if chart.kind == "points" else "lines+markers"
    marker = {"color": look.colour, "symbol": look.symbol, "size": 8}
    figure.add_scatter(**common, mode=mode, line=line, marker=marker, row=1, col=column)


def _title(look: Series) -> str:
    return "Ours" if look.value is None else plain(look.title)


def _add_published(
    figure: go.Figure,
    rows: Sequence[Row],
    chart: Chart,
    lying: bool,
    facet: object,
    series: Sequence[Series],
    column: int,
    dark: bool,
) -> None:
    """The paper's own values, on the bar of their series or its line."""
    for turn, each in enumerate(series):
        own = [row for row in _own(rows, chart, facet, each.value) if row.get(chart.published) is not None]
        if own:
            x, y = ([row[column] for row in own] for column in (chart.x, chart.published))
            figure.add_scatter(
                x=y if lying else x,
                y=x if lying else y,
                orientation="h" if lying else None,
                name=PUBLISHED,
                legendgroup=PUBLISHED,
                showlegend=column == 1 and turn == 0,
                mode="markers",
                offsetgroup=_title(each),
                marker={"symbol": "diamond-open", "size": 11, "color": ink(dark), "line": {"width": 2}},
                **tips(
                    f"{PUBLISHED}{'' if each.value is None else f', {_title(each)}'}<br>{plain(str(row[chart.x]))}: "
                    f"<b>{_number(row[chart.published])}</b>"
                    for row in own
                ),
                row=1,
                col=column,
            )


def _lies(rows: Sequence[Row], chart: Chart) -> bool:
    """True if the bars lie, since their names are too long to stand below them."""
    return chart.kind == "bars" and chart.facet is None and max((len(str(row[chart.x])) for row in rows), default=0) > LONGEST


def _own(rows: Sequence[Row], chart: Chart, facet: object, series: object) -> list[Row]:
    """The rows of one series in one panel."""
    wanted = [(column, value) for column, value in ((chart.facet, facet), (chart.series, series)) if column]
    return [row for row in rows if all(row[column] == value for column, value in wanted)]


def _number(value: object) -> str:
    return digits(value) if isinstance(value, (int, float)) else plain(str(value))
