"""The guide of a first visit: from page to page on the sample, until it is ended, and then never again in the session."""

import re

import pytest
from streamlit.testing.v1 import AppTest

from app.tables import plain
from app.visitor.glossary import STEPS
from tests.app.test_pages import ROOT, open_sample, press, visit


@pytest.fixture
def app() -> AppTest:
    return AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run()


def guide(app: AppTest) -> str:
    return next((caption.value for caption in app.caption if "**Guide" in caption.value), "")


def test_nobody_is_guided_before_the_sample_is_open_or_after_a_recording_of_their_own(app: AppTest) -> None:
    assert not guide(app)
    next(button for button in app.button if button.label == "Beta on prose").click()
    assert not guide(app.run())


def test_the_guide_speaks_of_what_is_open(app: AppTest) -> None:
    open_sample(app)
    assert "“alpha\\-code”." in guide(app)
    assert "8 GPUs of 4 types:" in guide(visit(app, "cluster"))
    press(app, plain("hgx-h100-8"))
    assert "8 GPUs of 1 type:" in guide(app)
    press(visit(app, "workload"), "Beta on prose")
    assert "“beta\\-prose”." in guide(app)


def test_each_step_leads_to_the_next_and_the_end_is_kept(app: AppTest) -> None:
    open_sample(app)
    steps = [(title, *step) for title, step in STEPS.items()]
    assert [title for title, *_ in steps] == [
        *("Workload", "Cluster", "Affinity", "Optimise", "Timeline", "What-if", "Review", "Launch")
    ]
    for number, (title, file, sentence) in enumerate(steps, 1):
        visit(app, file)
        assert app.header[0].value == title
        assert f"{number} of 8" in guide(app) and max(re.split(r"{\w+}", sentence), key=len) in guide(app)
        links = {link.proto.label for link in app.get("page_link")}
        leads = {link for link in links if link.startswith("Next: ")}
        assert leads == {f"Next: {after}" for after, *_ in steps[number : number + 1]}
    visit(app, "timeline")
    next(button for button in app.button if button.label == "End guide").click()
    assert not guide(app.run())
    again = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60)
    again.query_params["session"] = app.query_params["session"]
    assert not guide(again.run()) and not again.exception
    assert not guide(visit(again, "cluster"))


def test_the_guide_asks_for_a_run_until_one_was_asked_for(app: AppTest) -> None:
    visit(open_sample(app), "optimise")
    assert "Press Run: each plan" in guide(app)
    app.session_state["plan_jobs"] = ["20250102T030405000006-0123abcd"]
    assert "Each plan has a proven bound" in guide(app.run()) and "Press Run" not in guide(app)
