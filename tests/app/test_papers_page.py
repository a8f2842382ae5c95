"""The Papers page: a figure is found by its number, computed by a job, shown with its verdicts, and its settings open."""

import pytest
from streamlit.testing.v1 import AppTest

from app.charts import papers as charts
from engine.costs import Silicon, choice
from engine.reproduce.exhibits import Chart
from engine.reproduce.papers import PAPERS
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
    (table,) = (frame.value for frame in app.dataframe)
    assert table["The paper"].tolist() == ["522"] and table["Ours"].tolist() == ["864"] and table[""].tolist() == ["≈ partly"]
    pages.enter(app, "Figure or table", "Figure 3")
    assert "Not computed yet" in pages.said(app.info) and not app.dataframe
    later = pages.visit(pages.studio(session=app.session_state["token"]).run(), "papers")
    pages.enter(later, "Figure or table", "Table IV")
    assert later.dataframe[0].value.equals(table)


@needs_tables
def test_a_setting_opens_with_its_inputs_and_is_planned_for(app: AppTest) -> None:
    app.session_state["choices"] = {"paper": "pipemoe"}
    app.session_state["cost"] = choice.to_dict(Silicon())
    pages.visit(app, "papers")
    pages.enter(app, "Figure or table", "Figure 6")
    (entry,) = (entry for entry in PAPERS["pipemoe"].entries if entry.number == "Figure 6")
    (opening,) = entry.openings
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
    alone = charts.exhibit("Times", rows[:2], Chart(kind=kind, x="size", y="seconds", x_title="MB", y_title="time, s"))
    assert len(alone.data) == 1 and not alone.layout.showlegend
