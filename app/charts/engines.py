"""Charts of whole engines: predicted over measured times, and the parts of one token."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.charts import theme
from engine.compare.trust.whole_steps import Predicted
from engine.serving.parts import PARTS
from engine.units import TIME, scale_of, seconds, share, signed

COLUMNS, ROW = 3, 26
COLOURS = (theme.TEAL, theme.KIND_COLOURS["dispatch"], theme.KIND_COLOURS["dense"], theme.KIND_COLOURS["aggregate"])
SYMBOLS = ("circle", "diamond", "square", "cross")


def predicted_measured(rows: Sequence[Predicted], first: bool, title: str) -> go.Figure:
    """Every prediction over its measurement, a plot a GPU type and a colour an engine, with a line at equality.

    rows: with measured times
    first: True for the first token, else every further one
    """
    gpus = list(dict.fromkeys(row.step.deployment.gpu for row in rows))
    engines = list(dict.fromkeys(row.step.deployment.engine for row in rows))
    columns = min(len(gpus), COLUMNS)
    lines = -(-len(gpus) // columns)
    figure = make_subplots(
        lines,
        columns,
        shared_xaxes="all",
        shared_yaxes="all",
        subplot_titles=gpus,
        horizontal_spacing=0.03,
        vertical_spacing=0.12,
    )
    points = [(row, row.step.first_token, row.forecast.first_token) if first else _of_token(row) for row in rows]
    every = [1e3 * time for _, *both in points for time in both]
    ends = [min(every), max(every)]
    for place, gpu in enumerate(gpus):
        at = {"row": place // columns + 1, "col": place % columns + 1}
        line = {"color": theme.NEUTRAL, "width": 1, "dash": "dash"}
        figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line=line, hoverinfo="skip", showlegend=not place, **at)
        for number, engine in enumerate(engines):
            shown = [
                point for point in points if (point[0].step.deployment.gpu, point[0].step.deployment.engine) == (gpu, engine)
            ]
            figure.add_scatter(
                x=[1e3 * measured for _, measured, _ in shown] or [None],
                y=[1e3 * ours for *_, ours in shown] or [None],
                mode="markers",
                name=theme.plain(engine),
                legendgroup=engine,
                showlegend=not place,
                marker={"color": COLOURS[number % len(COLOURS)], "symbol": SYMBOLS[number % len(SYMBOLS)], "size": 6},
                **theme.tips(_tip(*point) for point in shown),
                **at,
            )
    # Few steps of a person may lie within one power of ten.
    figure.update_xaxes(type="log", dtick="D2", tickformat="~g")
    figure.update_yaxes(type="log", dtick="D2", tickformat="~g")
    figure.update_xaxes(title="Measured, ms", row=lines)
    figure.update_yaxes(title="Predicted, ms", col=1)
    height = 110 + 200 * lines
    return theme.finish(figure, title, height, top=90, legend=theme.legend_above(height))


def _of_token(row: Predicted) -> tuple[Predicted, float, float]:
    return row, row.step.token, row.forecast.token


def _tip(row: Predicted, measured: float, ours: float) -> str:
    demand = row.step.demand
    asked = f"{demand.users:,} users, {demand.prompt:,} in, {demand.output:,} out"
    off = signed(ours / measured - 1)
    return f"<b>{theme.plain(row.step.id)}</b><br>{asked}<br>measured {seconds(measured)}, predicted {seconds(ours)} ({off})"


def parts(row: Predicted, dark: bool = False) -> go.Figure:
    """One token's parts, one after another as they add up, and the measured time as a line."""
    spent = sorted(row.forecast.parts.items(), key=lambda part: -part[1])
    factor, unit = scale_of(max(row.forecast.token, row.step.token or 0.0), TIME)
    names = [*(name.capitalize() for name, _ in spent), "A token"]
    texts = [f"{name}: {seconds(time)}, {share(time / row.forecast.token)} ({PARTS[name]})" for name, time in spent]
    figure = go.Figure()
    figure.add_waterfall(
        x=[*(time / factor for _, time in spent), row.forecast.token / factor],
        y=names,
        measure=["relative"] * len(spent) + ["total"],
        orientation="h",
        increasing={"marker": {"color": theme.TEAL}},
        totals={"marker": {"color": theme.NEUTRAL}},
        connector={"line": {"color": theme.NEUTRAL, "width": 1}},
        text=[seconds(time) for _, time in spent] + [seconds(row.forecast.token)],
        textposition="outside",
        cliponaxis=False,
        showlegend=False,
        **{**theme.tips([*texts, f"predicted: {seconds(row.forecast.token)}"])},
    )
    title = f"{theme.plain(row.step.id)}: {seconds(row.forecast.token)} a token"
    if row.step.token is not None:
        figure.add_vline(x=row.step.token / factor, line={"color": theme.ink(dark), "width": 2, "dash": "dot"})
        title += f" predicted, {seconds(row.step.token)} measured (dotted)"
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title=unit, range=[0, 1.12 * max(row.forecast.token, row.step.token or 0.0) / factor])
    return theme.finish(figure, title, 90 + ROW * len(names))
