"""The first screen: what this is and what one gains, until a visitor has something of their own."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app import samples
from app.charts.workload import gain
from app.tables import plain
from engine import formats, store
from engine.costs import Datasheet
from engine.jobs import runner
from engine.problem import make_problem
from engine.systems import SYSTEMS, run
from tests.app.test_pages import ROOT, press, visit

SAMPLES = Path(ROOT) / "sample_traces"
GAIN = samples.gain()


@pytest.fixture
def app() -> AppTest:
    return AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run()


def welcomes(app: AppTest) -> bool:
    return any(button.label == "Plan the sample" for button in app.button)


@pytest.mark.clock
def test_the_gain_is_what_the_sample_gains():
    model = formats.read_model(SAMPLES / "tiny-moe-alpha.json")
    facts = {"num_experts": model.experts, "bytes_per_token": model.bytes_per_token}
    workload = formats.read_workload(SAMPLES / "tiny-moe" / "alpha-code.npz", **facts)
    problem = make_problem(workload, formats.read_cluster(SAMPLES / "mixed-8.json"), model, Datasheet())
    linear, planned = (run(SYSTEMS[name], problem).result.solution for name in ("linear", GAIN["system"]))
    assert linear.send_order.mode == "concurrent" and linear.claim.objective == pytest.approx(GAIN["linear_seconds"])
    assert planned.claim.objective == pytest.approx(GAIN["seconds"], rel=1e-3)
    assert planned.claim.bound == pytest.approx(GAIN["bound"], rel=1e-3)


def test_the_chart_draws_both_times_and_the_bound():
    figure = gain(2e-3, 1.5e-3, 1.4e-3, "Aurora")
    assert [bar.x for bar in figure.data] == [(2e-3,), (1.5e-3,)] and "1.33×" in figure.layout.title.text
    assert "1.4 ms" in figure.layout.annotations[0].text and figure.layout.shapes[0].x0 == 1.4e-3


def test_a_newcomer_plans_the_sample_with_one_click(app: AppTest):
    assert welcomes(app) and any("before you deploy it" in header.value for header in app.header)
    press(app, "Plan the sample")
    assert app.header[0].value == "Optimise" and any(button.label == "Run" for button in app.button)
    (job,) = app.session_state["plan_jobs"]
    runner.wait(runner.find(job, store.data_folder()), 60)
    assert len(app.run().dataframe[0].value) == 4 and app.session_state["plan_jobs"] == [job], "it runs once"
    assert not welcomes(visit(app, "workload"))


def test_who_brings_a_recording_is_left_alone(app: AppTest):
    press(app, "Upload mine")
    assert not welcomes(app) and app.get("file_uploader") and not welcomes(app.run())
    press(app, "Beta on prose")
    assert not welcomes(app)


def test_a_sample_of_real_size_is_called_synthetic(app: AppTest):
    press(app, "DeepSeek-R1 size (synthetic)")
    texts = [popover.proto.popover.label for popover in app.get("popover")]
    assert any(text.startswith("synthetic") for text in texts) and plain("DeepSeek-R1") in texts
    assert not welcomes(app)
    visit(app, "optimise")
    assert not app.error
