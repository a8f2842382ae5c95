"""Stacked bars, one for each plan: names above them, since a narrow window has no room at their side, and a legend below."""

from collections.abc import Sequence

import plotly.graph_objects as go

from app.charts.theme import finish, legend_at_foot, name_above_bar, plain, shortened

ROW, BAR, BELOW = 38, 0.45, 0.2
"""Pixels of a bar and its name; thickness of a bar, and its distance below the middle of its row, in rows."""
ACROSS = 0.3
"""Half of a line across a bar, in rows."""
AXIS, ENTRIES = 64, 19
"""Pixels of the time axis with a title of two lines, and of a line of the legend."""
ENTRY = 22
"""Characters of a legend's entry up to which a narrow window has room for two on a line."""
TOP = 44
"""Pixels above the bars, with the title."""
LABEL = 56
"""Most characters above a bar: a window of 1024 has room for them next to a form."""


def label(name: str, said: str) -> str:
    """Text above a bar: a plan's name, shortened to the room that `said` leaves, and `said`."""
    return f"{plain(shortened(name, LABEL - len(said)))}: {said}"


def arrange(figure: go.Figure, title: str, labels: Sequence[str], rows: Sequence[float], dark: bool) -> go.Figure:
    """The common look of a figure with bars that lie `BELOW` the middle of these rows.

    labels: text above each bar
    dark: the page's theme
    """
    names = [name_above_bar(said, row + BELOW - BAR / 2, dark) for said, row in zip(labels, rows, strict=True)]
    entries = [len(trace.name) for trace in figure.data if trace.showlegend is not False]
    below = AXIS + ENTRIES * (-(-len(entries) // 2) if max(entries) <= ENTRY else len(entries))
    height = TOP + round(ROW * (max(rows) + 1.2)) + below
    # As wide as it can be: a legend is given no more than the plot, and two of the longest entries just fit a narrow window.
    layout = {"margin": {"b": below, "l": 6, "r": 0}, "yaxis": {"range": [max(rows) + 0.6, -0.6], "visible": False}}
    return finish(figure, title, height, TOP, barmode="stack", legend=legend_at_foot(), annotations=names, **layout)
