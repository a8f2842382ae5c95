"""The ranked bar chart of plans: order, bounds, what is open and what is deployed."""

import math

import pytest

from app.charts import ranked as charts

NAMES, TIMES, BOUNDS = ["slow", "<b>fast</b>", "deployed one"], [3.0, 1.0, 2.0], [1.0, 1.0, math.nan]


def trace(figure, begin: str):
    return next(trace for trace in figure.data if trace.name.startswith(begin))


def names_in(figure) -> list[str]:
    """Above the bars, from the top."""
    return [note.text for note in figure.layout.annotations if note.yanchor == "bottom"]


def test_the_fastest_is_on_top_and_the_open_one_has_its_own_colour():
    figure = charts.ranked(NAMES, TIMES, BOUNDS, 2, 1)
    assert names_in(figure) == ["▸ &lt;b&gt;fast&lt;/b&gt;", "deployed one", "slow"]
    low, high = sorted(figure.layout.yaxis.range)
    assert list(figure.layout.yaxis.range) == [high, low], "the first row is the highest"
    opened, others = trace(figure, "The open"), trace(figure, "Other")
    assert list(opened.y) == [charts.BELOW] and list(opened.x) == [1]
    assert list(others.x) == [2, 3] and opened.marker.color != others.marker.color
    assert "<b>" not in str(figure.to_dict())


def test_names_stand_above_their_bars_and_leave_them_the_whole_width():
    long = "Replication (EPLB) · " + "r" * 40 + " · seed 7"
    figure = charts.ranked([long, "b"], [1.0, 2.0], [0.5, 1.0], 0, 1)
    assert figure.layout.yaxis.visible is False, "names beside the bars take as much as the longest needs"
    names = [note for note in figure.layout.annotations if note.yanchor == "bottom"]
    assert names[0].text.startswith("Replication (EPLB)") and names[0].text.endswith("· seed 7 (deployed)")
    assert len(names[0].text) < len(long)
    tops = sorted(y - charts.BAR / 2 for bar in figure.data if bar.type == "bar" for y in bar.y)
    assert [(note.xref, note.x, note.y) for note in names] == [("paper", 0, top) for top in tops]
    for name in ("Bound", "Deployed"):
        ends = [y for y in trace(figure, name).y if y is not None]
        assert all(any(abs(y - top - charts.BAR / 2) < 0.3 for top in tops) for y in ends), (
            "no line runs through a name"
        )


def test_every_proven_bound_has_a_tick_on_its_bar_and_what_is_deployed_a_line_through_all():
    figure = charts.ranked(NAMES, TIMES, BOUNDS, 2, 1)
    assert [x for x in trace(figure, "Bound").x if x is not None] == [1, 1, 1, 1]
    assert {round(y) for y in trace(figure, "Bound").y if y is not None} == {0, 2}
    line = trace(figure, "Deployed, 2 s")
    assert set(line.x) - {None} == {2} and {round(y) for y in line.y if y is not None} == {0, 1, 2}


@pytest.mark.parametrize(
    ("deployed", "title"),
    [
        (2, "&lt;b&gt;fast&lt;/b&gt; is 2× as fast as what is deployed"),
        (1, "No plan beats what is deployed"),
        (None, "&lt;b&gt;fast&lt;/b&gt; is fastest: 1 s"),
    ],
)
def test_the_title_is_against_what_is_deployed(deployed, title):
    assert charts.ranked(NAMES, TIMES, BOUNDS, deployed).layout.title.text == title
    assert charts.ranked(NAMES, TIMES, BOUNDS, deployed, so_far=True).layout.title.text == f"{title} so far"


def test_of_a_hundred_plans_the_fastest_are_drawn_and_what_is_deployed_and_open():
    times = [float(100 - at) for at in range(100)]
    figure = charts.ranked([f"plan {at}" for at in range(100)], times, [math.nan] * 100, 0, 3)
    shown = names_in(figure)
    assert len(shown) == charts.MOST + 2 and shown[0] == "plan 99" and shown[-2:] == ["▸ plan 3", "plan 0 (deployed)"]
    assert figure.layout.title.text.endswith(f"({charts.MOST + 2} of 100 plans)")
    assert figure.layout.height < 800


def test_plans_that_take_no_time():
    assert charts.ranked(["a"], [0.0], [0.0], 0).layout.title.text == "a is fastest: 0 s"
