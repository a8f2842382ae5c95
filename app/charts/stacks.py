"""Stacked bars, one for each plan: names above them, for which a narrow window has no room beside, and a legend at the foot."""

from collections.abc import Sequence

import plotly.graph_objects as go

from app.charts.theme import finish, legend_at_foot, name_above_bar, plain, shortened

ROW, BAR, BELOW = 38, 0.45, 0.2
"""Pixels of a bar and what stands above it; how thick a bar is, in rows, and how far below the middle of its row."""
ACROSS = 0.3
"""Half of a line across a bar, in rows."""
AXIS, ENTRIES = 64, 19
"""Pixels of the time axis with a title of two lines, and of a line of the legend."""
ENTRY = 22
"""Characters of a legend's entry up to which a narrow window has room for two on a line."""
TOP = 44
"""Pixels above the bars, with the title."""
LABEL = 56
"""Characters above a bar that a window of 1024 has room for beside a form."""


def label(name: str, said: str) -> str:
    """What stands above a bar: as much of a plan's name as what is said of it leaves room for."""
    return f"{plain(shortened(name, LABEL - len(said)))}: {said}"


def arrange(figure: go.Figure, title: str, labels: Sequence[str], rows: Sequence[float], dark: bool) -> go.Figure:
    """The common look of a figure whose bars lie `BELOW` the middle of these rows. labels: above them; dark: of the page."""
    for label, row in zip(labels, rows, strict=True):
        name_above_bar(figure, label, row + BELOW - BAR / 2, dark)
    figure.update_yaxes(range=[max(rows) + 0.6, -0.6], visible=False)
    entries = [len(trace.name) for trace in figure.data if trace.showlegend is not False]
    below = AXIS + ENTRIES * (-(-len(entries) // 2) if max(entries) <= ENTRY else len(entries))
    height = TOP + round(ROW * (max(rows) + 1.2)) + below
    finish(figure, title, height, TOP, barmode="stack", legend=legend_at_foot())
    # As wide as it can be: a legend is given no more than the plot, and two of the longest entries just fit a narrow window.
    return figure.update_layout(margin_b=below, margin_l=6, margin_r=0)
