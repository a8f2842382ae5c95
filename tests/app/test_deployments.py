"""The cheapest deployments on the What-if page: their front, the parts of a token, and questions that cannot be."""

import pytest
from streamlit.testing.v1 import AppTest

from engine.units import seconds, share
from tests.cases import pages
from tests.cases.problems import small
from tests.cases.sessions import open_recording
from tests.strategies import make_model

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def page(app: AppTest) -> AppTest:
    """A small recording on four mixed GPUs, as this study asks of the open model alone."""
    problem = small()
    open_recording(app, problem.workload, alone=True)
    app.session_state["model"], app.session_state["cluster"] = problem.model, problem.cluster
    return pages.visit(app, "what_if")


def test_the_cheapest_deployments_show_their_front_and_the_parts_of_a_token(page: AppTest) -> None:
    page.session_state["choices"] = {"deployment-prices": ["H200", 3.0, "B200", 5.0, "H9000", 1.0], "deployment-most": 2}
    pages.pick(page, "what-if-study", "deployments")
    assert "Nothing run yet" in pages.said(page.info) and "Attention and vocabulary: assumed" in pages.said(page.caption)
    job = pages.run_the_job(page, "Find the cheapest deployments", "deployments")
    points = job.result["points"]
    assert {row["deployment"]["gpu"] for row in points} == {"H200", "B200"} and all(row["gpus"] <= 2 for row in points)
    best = next(row for row in points if row["best"])
    (title,) = pages.titles(page, "what-if-deployments")
    assert title.startswith(f"{best['gpus']} × {best['deployment']['gpu']}, ${best['million']:,.3f} a million tokens: ")
    assert title.endswith("the cheapest")
    first, most = max(points[0]["parts"].items(), key=lambda part: part[1])
    (title,) = pages.titles(page, "what-if-deployment-parts")
    assert (
        title
        == f"{first[0].upper()}{first[1:]}: {share(most / points[0]['token'])} of the {seconds(points[0]['token'])} of a token"
    )
    table = next(each.value for each in page.dataframe if "A million tokens" in each.value)
    assert list(table["A million tokens"]) == [f"${row['million']:,.3f}" for row in points]
    left_out = page.dataframe[-1].value
    assert list(left_out["GPU type"]) == [each["gpu"] for each in job.result["left_out"]] and len(left_out)
    later = pages.visit(pages.studio(session=page.session_state["token"]).run(), "what_if")
    assert pages.titles(later, "what-if-deployments") == pages.titles(page, "what-if-deployments")
    pages.put(page, model=make_model(3, 8, 2))
    assert not pages.titles(page, "what-if-deployments") and not page.exception


def test_questions_of_deployments_that_cannot_be_are_one_line(page: AppTest) -> None:
    page.session_state["choices"] = {"deployment-prices": ["H200", "dear", 3.0]}  # stored by who knows whom
    pages.pick(page, "what-if-study", "deployments")
    assert pages.button(page, "Find the cheapest deployments").disabled and not page.error
    for target, reason in (("soon", "'soon' is not understood"), ("5 ms at 4 users", "leave their number out")):
        page.text_input(key="deployment-target").set_value(target).run()
        (complaint,) = pages.complaints(page)
        assert reason in complaint and not page.exception
    page.text_input(key="deployment-target").set_value("").run()
    assert not page.error
