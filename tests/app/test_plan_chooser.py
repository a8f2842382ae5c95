"""The choice of the open plan: names that differ, also of a hundred; renamed, sorted, removed and brought back."""

import math
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app import cached, plan_chooser
from engine.plan import Plan
from tests.cases.pages import offered_plans, press, put, run, studio, visit
from tests.cases.sessions import ANOTHER, JOB, plan, problem_of


@pytest.fixture
def app(ana: AppTest) -> AppTest:
    return visit(ana, "optimise")


def chooser(app: AppTest):
    return app.selectbox(key="choose-plan")


def rename(app: AppTest, name: str) -> AppTest:
    next(field for field in app.text_input if (field.key or "").startswith("name-plan-")).set_value(name)
    return run(app)


def test_choosing_opens_and_plans_of_one_system_are_told_apart_everywhere(app: AppTest) -> None:
    linear, shortest = app.plans
    assert chooser(app).value == shortest.id
    chooser(app).set_value(linear.id).run()
    assert app.session_state["plan"] == linear.id and chooser(app).value == linear.id
    plan(problem_of(app), ANOTHER, {"name": "sjf", "options": {"placement": "aurora"}})
    put(app, plan_jobs=[ANOTHER, JOB])
    name = app.plans[1].name
    told = {f"{name} · linear placement", f"{name} · aurora placement"}
    assert told <= set(offered_plans(app)) and told <= set(app.dataframe[0].value["Plan"])
    assert told & set(next(box for box in visit(app, "timeline").multiselect if box.label == "Compare with").options)


def test_a_name_is_kept_shown_everywhere_and_taken_back(app: AppTest) -> None:
    own = app.plans[1]
    rename(app, "  the one for <b>Monday</b> ")
    assert app.session_state["plan_names"] == {own.id: "the one for <b>Monday</b>"}
    assert "the one for <b>Monday</b>" in app.dataframe[0].value["Plan"].tolist()
    again = studio(session=app.query_params["session"])
    assert "the one for <b>Monday</b>" in offered_plans(again.run())
    rename(app, "")
    assert app.session_state["plan_names"] == {} and own.name in offered_plans(app)


def test_removing_can_be_undone_and_a_plan_is_found_again(app: AppTest) -> None:
    linear, shortest = app.plans
    press(app, "Remove from the list")
    assert app.session_state["plan"] is None and offered_plans(app) == [linear.name]
    assert app.dataframe[0].value["Plan"].tolist() == [linear.name]
    press(app, next(button.label for button in app.button if button.label.startswith("Bring back")))
    assert app.session_state["plan"] == shortest.id and len(offered_plans(app)) == 2
    assert app.session_state["removed_plans"] == {}
    # One that is found again is there again.
    press(app, "Remove from the list")
    plan(problem_of(app), ANOTHER, "sjf")
    put(app, plan_jobs=[ANOTHER, JOB])
    assert app.plans[1].name in offered_plans(app)


def test_what_is_deployed_is_not_removed(app: AppTest) -> None:
    put(app, in_use=app.plans[1].id)
    assert f"{app.plans[1].name} (deployed now)" in offered_plans(app)
    assert next(button for button in app.button if button.label == "Remove from the list").disabled


def test_a_hundred_plans_are_searched_and_sorted(app: AppTest, own_data_folder: Path) -> None:
    wanted = [{"name": "random", "options": {"seed": seed}} for seed in range(100)]
    plan(problem_of(app), ANOTHER, *wanted)
    put(app, plan_jobs=[ANOTHER, JOB])
    assert not app.exception and chooser(app).label == "Open plan, of 102"
    names = offered_plans(app)
    assert len(set(names)) == 102 and "Random placement · seed 99" in names
    app.segmented_control(key="choose-plan-sort").set_value("By name").run()
    assert offered_plans(app) == sorted(names, key=str.casefold)


def test_the_fastest_are_sorted_by_their_claims_and_those_without_come_last(app: AppTest) -> None:
    def candidate(own: Plan, objective: float | None) -> cached.Candidate:
        claim = own.claim and own.claim.model_copy(update={"objective": objective})
        return cached.Candidate(own.model_copy(update={"claim": claim if objective else None}), "", math.nan, {})

    own = app.plans[0]
    known = {str(place): candidate(own, time) for place, time in enumerate((3.0, None, 1.0))}
    assert plan_chooser.ids_in("Fastest first", known) == ["2", "0", "1"]
    assert plan_chooser.ids_in("Newest first", known) == ["0", "1", "2"]
