"""Whole engines on the Cluster page: public measurements, a person's own table, and tables that cannot be read."""

from streamlit.testing.v1 import AppTest

from engine.catalogue import cluster_presets
from tests.cases.cli import SAMPLES
from tests.cases.pages import complaints, enter, pick, run, said, titles, upload, visit
from tests.costs.silicon import needs_tables

pytestmark = needs_tables
OWN = (SAMPLES / "serving-steps.csv").read_text()


def opened(app: AppTest) -> AppTest:
    app.session_state["cluster"] = cluster_presets()["mixed-8"].cluster
    visit(app, "cluster")
    next(toggle for toggle in app.toggle if toggle.label.startswith("Compare whole engines")).set_value(True)
    return run(app)


def test_public_measurements_are_compared_and_split_up(app: AppTest) -> None:
    opened(app)
    chart, parts = titles(app, "engine-step")
    assert chart.startswith("345 times per token are 6.7 % off") and "a token predicted" in parts
    enter(app, "Errors by", "GPU")
    (table,) = (frame.value for frame in app.dataframe if "Inside the interval" in frame.value)
    assert {"H200", "GB200"} <= set(table["GPU"]) and table["Steps"].sum() == 345
    pick(app, "engine-steps-time", "The first token")
    assert "345 first tokens are 21 % off" in titles(app, "engine-steps-chart")[0]


def test_a_person_s_own_steps_and_the_rows_that_cannot_be(app: AppTest) -> None:
    opened(app)
    wrong = OWN.splitlines()[-1].rsplit(",", 1)[0].replace("minimax", "slow") + ",0.0448"
    upload(app, "engine-steps", {"mine.csv": OWN + wrong + "\n"})
    assert titles(app, "engine-steps-chart")[0].startswith("12 times per token are 7.2 % off")
    assert "is it in seconds?" in said(app.warning) and "12 measured" not in said(app.warning)
    causes = next(frame.value for frame in app.dataframe if "Times as long" in frame.value)
    assert len(causes) > 2
    unmeasured = "\n".join(line.rsplit(",", 2)[0] + ",," if number else line for number, line in enumerate(OWN.splitlines()))
    upload(app, "engine-steps", {"plans.csv": unmeasured})
    assert not titles(app, "engine-steps-chart") and len(titles(app, "engine-step-parts")) == 1


def test_a_table_of_something_else_is_refused_in_a_line(app: AppTest) -> None:
    opened(app)
    upload(app, "engine-steps", {"mine.csv": "gpu,ms\nH200,20\n"})
    assert ["the columns backend, model_path" in text for text in complaints(app)] == [True]
