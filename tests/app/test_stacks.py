"""Stacked bars keep their height and their names, whatever stands in them and in the legend."""

import plotly.graph_objects as go
import pytest

from app.charts import stacks


@pytest.mark.parametrize(("entry", "lines"), [("a" * stacks.ENTRY, 2), ("a" * (stacks.ENTRY + 1), 3)])
def test_the_legend_takes_nothing_from_the_bars(entry: str, lines: int) -> None:
    figure = go.Figure(
        [go.Bar(name=name) for name in ("one", "two", entry)] + [go.Bar(name="not in it", showlegend=False)]
    )
    layout = stacks.arrange(figure, "title", ["plan", "other"], [0, 1], False).layout
    assert layout.margin.b == stacks.AXIS + lines * stacks.ENTRIES
    assert layout.height - layout.margin.b - layout.margin.t == pytest.approx(2.2 * stacks.ROW, abs=1)


def test_what_is_said_of_a_plan_is_whole_and_its_name_is_text() -> None:
    said = "90.8 ms, bound 75 ms, +21 %"
    label = stacks.label("<b>" + "x" * 100, said)
    assert label.startswith("&lt;b&gt;x") and label.endswith(f"x: {said}")
    assert stacks.label("Aurora", said) == f"Aurora: {said}"
