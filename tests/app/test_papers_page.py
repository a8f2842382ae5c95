"""The Papers page: a figure is found by its number, computed by a job, shown with its verdicts, and its settings open."""

import pytest
from streamlit.testing.v1 import AppTest

from app.charts import papers as charts
from app.charts import theme
from app.charts.optimise import SCHEMES
from app.charts.series import KINDS, OTHERS, SYSTEMS, series_of
from app.charts.what_if_studies import STYLES
from engine.costs import Silicon, choice
from engine.reproduce.exhibits import Chart
from engine.reproduce.papers import PAPERS
from engine.systems import TRAINING
from tests.cases import pages
from tests.costs.silicon import needs_tables

pytestmark = pytest.mark.usefixtures("warm_python")


def test_a_figure_is_computed_shown_with_its_verdicts_and_kept(app: AppTest) -> None:
    pages.visit(app, "papers")
    assert "Not computed yet" in pages.said(app.info)
    pages.enter(app, "Paper", "pipemoe")
    pages.enter(app, "Figure or table", "Table IV")
    pages.run_the_job(app, "Compute Table IV", "reproduce")
    assert "of 1 published number 1 partly" in pages.said(app.markdown)
    (table,) = (shown.value for shown in app.table)
    found = [table[column].tolist() for column in ("The paper", "Ours", "Verdict")]
    assert found == [["522"], ["864"], ["≈ partly"]]
    assert app.expander[0].label == "Why they differ" and "How memory was used is not published" in pages.said(app.markdown)
    pages.enter(app, "Figure or table", "Figure 3")
    assert "Not computed yet" in pages.said(app.info) and not app.table
    later = pages.visit(pages.studio(session=app.session_state["token"]).run(), "papers")
    pages.enter(later, "Figure or table", "Table IV")
    assert later.table[0].value.equals(table)


@needs_tables
def test_a_setting_opens_with_its_inputs_and_is_planned_for(app: AppTest) -> None:
    app.session_state["choices"] = {"paper": "pipemoe"}
    app.session_state["cost"] = choice.to_dict(Silicon())
    pages.visit(app, "papers")
    pages.enter(app, "Figure or table", "Figure 6")
    (entry,) = (entry for entry in PAPERS["pipemoe"].entries if entry.number == "Figure 6")
    opening = entry.openings[0]
    problem = opening.problem()
    pages.press(app, opening.title)
    pages.finished("optimise")
    session = app.session_state
    assert (session["cluster"], session["model"], session["step"]) == (problem.cluster, problem.model, problem.step)
    assert session["workload"] == problem.workload.digest
    assert session["cost"] == choice.to_dict(problem.cost), "on other costs the plan would not be the figure's"
    job = pages.finished("optimise")
    (candidate,) = job.result["candidates"]
    assert candidate["plan"]["provenance"]["optimiser"] == "pipemoe"


@pytest.mark.parametrize("kind", ["bars", "lines", "points", "steps"])
def test_charts_have_every_value_and_the_published_ones(kind: str) -> None:
    rows = [
        {"gpus": gpus, "system": system, "size": size, "seconds": size * gpus, "paper": size if system == "a" else None}
        for gpus in (16, 32)
        for system in ("a", "b<i>")
        for size in (1.0, 2.0)
    ]
    chart = Chart(
        kind=kind, x="size", y="seconds", series="system", facet="gpus", published="paper", x_title="MB", y_title="time, s"
    )
    figure = charts.exhibit("Times", rows, chart)
    drawn = [value for trace in figure.data if trace.name != charts.PUBLISHED for value in trace.y]
    assert sorted(drawn) == sorted(row["seconds"] for row in rows)
    published = [trace for trace in figure.data if trace.name == charts.PUBLISHED]
    assert [list(trace.y) for trace in published] == [[1.0, 2.0]] * 2 and all("<i>" not in trace.name for trace in figure.data)
    # Marks of a group would move aside, and points of a line away from their x.
    assert (figure.layout.scattermode == "group") == (kind == "bars")
    # Numbers of GPUs that are texts would be places on a line, with bars of any width.
    assert (figure.layout.xaxis.type == "category") == (kind == "bars")
    alone = charts.exhibit("Times", rows[:2], Chart(kind=kind, x="size", y="seconds", x_title="MB", y_title="time, s"))
    assert len(alone.data) == 1 and not alone.layout.showlegend


def test_bars_with_long_names_lie() -> None:
    rows = [
        {"way": f"an assumption of many words, number {number}", "gain": float(number), "paper": 1.5} for number in range(3)
    ]
    chart = Chart(kind="bars", x="way", y="gain", published="paper", x_title="way", y_title="gain")
    bars, published = charts.exhibit("Ways", rows, chart).data
    assert bars.orientation == "h" and list(bars.x) == [0.0, 1.0, 2.0] and list(bars.y) == [row["way"] for row in rows]
    assert list(published.x) == [1.5] * 3 and list(published.y) == list(bars.y)
    rows = [*({"of": "one"} | row for row in rows), {"of": "other", "way": "short", "gain": 1.0}]
    chart = Chart(kind="bars", x="way", y="gain", series="of", x_title="way", y_title="gain")
    assert [bars.orientation for bars in charts.exhibit("Ways", rows, chart).data] == ["h", "h"], "all of a chart, or none"


def test_series_have_the_colours_and_the_order_of_the_other_pages() -> None:
    parts = {each.value: each for each in series_of(["other", "experts", "all-to-all"])}
    assert list(parts) == ["all-to-all", "experts", "other"], "as KIND_TITLES and PARTS have them"
    assert parts["all-to-all"].colour == theme.KIND_COLOURS["dispatch"]
    assert parts["experts"].colour == theme.KIND_COLOURS["ffn"] and parts["other"].colour == theme.PARTS["other"][1]
    orders = series_of(["RCS", "SJF", "Aurora"])
    assert [(each.value, each.colour) for each in orders] == [
        (name, STYLES[name.lower()][0]) for name in ("Aurora", "SJF", "RCS")
    ]
    schemes = series_of(["lina", "without_fine_tuning", "baseline"])
    assert [(each.title, each.colour) for each in schemes] == [
        SCHEMES[key][:2] for key in ("baseline", "lina", "without_fine_tuning")
    ]
    training = {each.value: each.colour for each in series_of(system.title for system in TRAINING.values())}
    assert training["Lancet"] == training["PipeMoE"] == theme.TEAL and training["DeepSpeed (no overlap)"] == theme.NEUTRAL
    one, other = series_of(["Lina, B/16", "Lina, B/32"])
    assert one.colour == other.colour and (one.pattern, other.pattern) == ("", "/"), "the second model is hatched"


def test_a_series_that_is_no_kind_has_the_colour_of_none_and_each_has_its_sign() -> None:
    kinds = set(theme.KIND_COLOURS.values()) | {theme.EXPOSED, theme.MARK}
    assert not kinds & set(OTHERS)
    many = series_of([f"model {number}" for number in range(8)])
    assert len({each.colour for each in many}) == len({each.pattern for each in many}) == 8
    assert len({each.colour for each in series_of(["lina", "baseline", "ideal", "static"])}) == 4
    mixed = series_of([*SYSTEMS, *KINDS][:8])
    assert len({each.pattern for each in mixed}) == 8
