"""Charts of many plans: what they draw, and that their titles say what is true."""

import numpy as np
import pytest

from app.charts import optimise as charts
from app.charts.theme import SECOND, SEQUENTIAL, readable, write_numbers


def point(kept: float, balance: float, seconds: float = 1e-3) -> dict:
    return {"kept_share": kept, "balancedness": balance, "weight": 0.5, "seconds": seconds}


def test_a_front_runs_from_balance_to_affinity_in_any_order():
    figure = charts.front([point(0.4, 0.6), point(0.2, 0.9), point(0.3, 0.8)], {}, [(0.1, 0.5)], "other <b>")
    front, elsewhere = figure.data
    assert list(front.x) == [20, 30, 40] and list(front.y) == [0.9, 0.8, 0.6]
    assert list(elsewhere.x) == [10] and elsewhere.marker.color == SECOND and "<b>" not in elsewhere.name
    assert "20 % kept at balancedness 0.9 to 40 % at 0.6" in figure.layout.title.text


def test_a_front_of_rows_has_few_rows_to_the_right():
    points = [
        {"rows": rows, "balancedness": balance, "weight": 0.5, "seconds": 1e-3}
        for rows, balance in ((2, 0.6), (3, 0.9))
    ]
    figure = charts.front(points, {"Linear": (3.54321, 0.7)}, across=charts.ROWS)
    front, others = figure.data
    assert list(front.x) == [3, 2] and list(others.x) == [3.543]
    assert figure.layout.xaxis.autorange == "reversed" and "rows" in figure.layout.xaxis.title.text
    assert figure.layout.title.text == "From 3 rows per token at balancedness 0.9 to 2 at 0.6"


def test_plans_at_one_place_share_a_label():
    others = {"Linear": (0.125, 0.7), "RCS": (0.1250001, 0.7), "<i>mine</i>": (0.3, 0.5)}
    names = charts.front([point(0.4, 0.6)], others).data[1].text
    assert sorted(names) == ["&lt;i&gt;mine&lt;/i&gt;", "Linear, RCS"]


def test_a_matrix_of_times_is_relative_to_each_recordings_own_plan():
    figure = charts.matrix(["a", "b"], [[1e-3, 3e-3], [2e-3, 2e-3]], "seconds")
    np.testing.assert_allclose(figure.data[0].z, [[1, 1.5], [2, 1]])
    assert "up to 2× " in figure.layout.title.text
    assert list(figure.data[1].text) == ["1 ms", "3 ms", "2 ms", "2 ms"]


def test_times_that_are_nearly_equal_have_one_colour_and_a_scale_of_some_width():
    figure = charts.matrix(["a", "b"], [[1.0, 2.0 + 1e-9], [1.0008, 2.0]], "seconds")
    assert np.array_equal(figure.data[0].z, np.ones((2, 2)))
    assert (figure.data[0].zmin, figure.data[0].zmax) == (1.0, 1.05)
    assert figure.layout.title.text.startswith("No plan is slower")
    figure = charts.matrix(["a", "b"], [[1.0, 2.02], [1.0, 2.0]], "seconds")
    assert figure.data[0].zmax == 1.05 and "1.01×" in figure.layout.title.text
    faster = charts.matrix(["a", "b"], [[1.0, 1.0], [1.0, 2.0]], "seconds").data[0]
    assert faster.zmin == 0.5 and faster.zmax == pytest.approx(1.0)
    nothing = charts.matrix(["a", "b"], [[0.0, 0.0], [0.0, 0.0]], "kept_local").data[0]
    assert (nothing.zmin, nothing.zmax) == (0.0, 0.05)


@pytest.mark.parametrize("what", list(charts.SCORES))
def test_a_matrix_that_is_still_filling_in(what):
    figure = charts.matrix(["a", "b"], [[0.5, 0.25], [None, None]], what)
    assert np.isnan(figure.data[0].z[1]).all() and figure.data[1].text[2] == "…"
    assert figure.layout.title.text == "2 of 4 scores so far"
    assert charts.matrix(["a", "b"], [[None, None], [None, None]], what).layout.title.text


def figures(**median: float) -> dict:
    return {name: {"median_inference": median.get(name, 1.5), "tail_inference": 2.0} for name in charts.SCHEMES}


def test_lina_says_who_wins():
    assert "is 1.5× as fast as no scheduling" in charts.lina(figures(baseline=1.8, lina=1.2), 3).layout.title.text
    assert "takes 2× the time of no scheduling" in charts.lina(figures(baseline=1.2, lina=2.4), 3).layout.title.text


def test_accuracy_names_the_best_path_length():
    runs = [
        {"options": {"path_length": length}, "accuracy": right, "accuracy_of_layer": [None, right, right]}
        for length, right in ((1, 0.25), (3, 0.75))
    ]
    figure = charts.accuracy(runs)
    assert figure.layout.title.text == "Path length 3 is right most often: 75 %"
    assert figure.data[1].y[0] is None and figure.data[1].y[1] == 75


@pytest.mark.parametrize("dark", [False, True])
def test_numbers_in_cells_can_be_read(dark):
    figure = charts.go.Figure()
    scale = {"z": [[0.0, 1.0]], "zmin": 0, "zmax": 1, "colorscale": SEQUENTIAL}
    write_numbers(figure, scale, [["0", "1"]], dark)
    pale, full = figure.data[0].textfont.color
    assert pale == readable((0, 137, 123, 0.0), dark) and full == readable((0, 137, 123, 1.0), dark)
    assert (pale == "#FFFFFF") is dark
