"""The charts of a sweep mark the best value, name references and bound, and say what was found."""

import json
import math

import pytest

from app.charts import sweep as charts
from engine.compare.sweep import SweepPoint


def point(
    value: float | None, total: float, series: str = "one", forward: float = 0.03, bound: float = 0.05
) -> SweepPoint:
    parts = {"communication": total / 4, "computation": total / 2, "overlapped": total / 4, "idle": 0.0}
    return SweepPoint(series, value, total, bound, forward, parts, 10, 0.001, 2, f"plan-{series}-{value}")


MICRO = [point(10, 0.1), point(30, 0.0936), point(200, 0.0974)]


def trace(figure, name: str):
    return next(trace for trace in figure.data if trace.name == name)


def said(figure) -> list[str]:
    return [annotation.text for annotation in figure.layout.annotations if annotation.text]


def test_the_title_states_the_best_value_and_what_the_worst_costs() -> None:
    assert charts.title(MICRO, "micro_op") == "30 MB micro-ops are best: 93.6 ms; 10 MB cost 6.8 % more"
    assert charts.title(MICRO[:2], "micro_op", complete=False).startswith("So far: 30 MB micro-ops are best")
    degrees = [point(1, 0.12), point(2, 0.1), point(3, 0.1)]
    assert charts.title(degrees, "degree") == "Degrees 2 to 3 are best: 100 ms; 1 costs 20 % more"
    ranges = [point(0, 0.12), point(8, 0.1)]
    assert charts.title(ranges, "range") == "Ranges up to 8 operators are best: 100 ms; none costs 20 % more"
    assert charts.title([point(0, 0.1), point(8, 0.12)], "range") == (
        "No partition is best: 100 ms; ranges up to 8 cost 20 % more"
    )
    assert charts.title([point(2, 0.1), point(4, 0.1)], "degree") == "Every value takes 100 ms"
    assert charts.title([point(2, 0.1)], "degree") == "Degree 2 is best: 100 ms"
    assert charts.title([], "degree") == charts.title([point(None, 1.0)], "degree") == "No points yet"


def test_a_reference_that_beats_every_value_is_said() -> None:
    rival = point(None, 0.089, "fair sharing")
    assert charts.title([*MICRO, rival], "micro_op") == "30 MB micro-ops are best: 93.6 ms, but 89 ms with fair sharing"
    slower = point(None, 0.12, "naive")
    assert "naive" not in charts.title([*MICRO, slower], "micro_op")


def test_the_forward_pass_has_a_finding_of_its_own() -> None:
    points = [point(0, 0.1, forward=0.04), point(8, 0.11, forward=0.02)]
    figure = charts.times(points, "range", "forward")
    assert figure.layout.title.text == "Ranges up to 8 operators are best: 20 ms; none costs 100 % more"
    assert list(trace(figure, "one").y) == pytest.approx([40, 20])
    assert not any("bound" in text for text in said(figure)), "the bound is that of the whole step"


def test_every_series_is_a_line_and_the_best_point_is_marked() -> None:
    points = [point(1, 0.11), point(2, 0.1), point(1, 0.11, "two"), point(2, 0.09, "two"), point(None, 0.08, "<b>own")]
    figure = charts.times(points, "degree")
    assert list(trace(figure, "one").x) == list(trace(figure, "two").x) == [1, 2]
    assert trace(figure, "one").line.dash != trace(figure, "two").line.dash
    star = next(trace for trace in figure.data if trace.marker.symbol == "star")
    assert (star.x[0], star.y[0]) == (2, pytest.approx(90)) and "90 ms" in star.text[0]
    assert charts.times([point(1, 0.1, "<b>")], "degree").data[0].name == "&lt;b&gt;"
    assert "&lt;b&gt;own, 80 ms" in said(figure) and "<b>own" not in figure.to_json()
    assert "bound, 50 ms" in said(figure)


def test_names_of_references_stand_away_from_the_best_point_and_join_where_lines_do() -> None:
    references = [point(None, 0.0889, "fair"), point(None, 0.0893, "fixed"), point(None, 0.117, "naive")]
    figure = charts.times([*MICRO, *references], "micro_op")
    together = next(
        annotation for annotation in figure.layout.annotations if annotation.text and "fair" in annotation.text
    )
    alone = next(
        annotation for annotation in figure.layout.annotations if annotation.text and "naive" in annotation.text
    )
    assert together.text == "fair, 88.9 ms · fixed, 89.3 ms" and together.yanchor == "top"
    assert alone.text == "naive, 117 ms" and alone.yanchor == "bottom"
    assert len([shape for shape in figure.layout.shapes if shape.type == "line"]) == 3


def test_axes_fit_their_values() -> None:
    figure = charts.times([point(value, 0.1) for value in (1, 2, 5, 10, 11, 12, 200)], "micro_op")
    low, high = figure.layout.xaxis.range
    assert figure.layout.xaxis.type == "log" and low < 0 and high > math.log10(200)
    shown = figure.layout.xaxis.tickvals
    assert 200 in shown and len(shown) < 7, "labels that would run into each other are left out"
    figure = charts.times([point(value, 0.1) for value in (0, 4, 136)], "range")
    assert figure.layout.xaxis.ticktext == ("none", "4", "136") and list(trace(figure, "one").x) == [0, 1, 2]
    assert charts.times([point(16, 0.1)], "degree").layout.xaxis.ticktext == ("16",)
    assert "ms (simulated)" in charts.times(MICRO, "micro_op").layout.yaxis.title.text


def test_the_parts_add_up_and_name_the_least_exposed_value() -> None:
    figure = charts.decomposition([*MICRO, point(5, 0.01, "two")], "micro_op", "one")
    assert [sum(trace.y[place] for trace in figure.data) for place in range(3)] == pytest.approx([100, 93.6, 97.4])
    assert len(figure.data) == 3, "what takes no time has no place in the legend"
    assert all(trace.stackgroup for trace in figure.data)
    assert figure.layout.title.text == "Least exposed: 23.4 ms with 30 MB micro-ops"
    assert len({trace.fillpattern.shape for trace in figure.data[:2]}) == 2, "colour is never the only sign"


@pytest.mark.parametrize("kind", charts.AXES)
@pytest.mark.parametrize("points", [[], [point(4, 0.1)], [point(None, 0.1, "alone")]])
def test_few_points_can_be_drawn(kind: str, points: list[SweepPoint]) -> None:
    for figure in (charts.times(points, kind), charts.decomposition(points, kind, "one")):
        json.loads(figure.to_json())
        assert figure.layout.title.text
