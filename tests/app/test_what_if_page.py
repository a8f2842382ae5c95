"""The What-if page of a training step in every state it can be met in, without a browser: sliders, sweeps, sensitivity."""

import pytest
from streamlit.testing.v1 import AppTest

from app.what_if import sweeps
from engine.catalogue import cluster_presets, model_presets
from engine.errors import InputError
from engine.jobs import runner
from engine.training import TrainingStep
from tests.cases.pages import button, complaints, offered_plans, pick, press, run_the_job, said, studio, titles, visit
from tests.strategies import cluster_of, make_gpu, make_model

pytestmark = pytest.mark.usefixtures("warm_python")

STEP = TrainingStep(batch=8, sequence_length=16, heads=4, dense_d_ff=96, vocabulary=2000)


@pytest.fixture
def training(app: AppTest) -> AppTest:
    """A small training step, opened on its page; no recording."""
    app.session_state["model"] = make_model(2, 4)
    app.session_state["cluster"] = cluster_of(*(make_gpu() for _ in range(4)), latency=1e-4)
    open_step(app)
    return visit(app, "what_if")


def open_step(app: AppTest, **more) -> None:
    """Put the step into the session, as described for the open model."""
    step = STEP.model_copy(update=more)
    app.session_state["step"] = step
    app.session_state["steps"] = {app.session_state["model"].digest: step}


def run(app: AppTest, kind: str, values: str) -> runner.Job:
    """Sweep some values to the end."""
    pick(app, "sweep-kind", kind)
    app.text_input[0].set_value(values).run()
    return run_the_job(app, "Run the sweep", "sweep")


def test_a_step_that_does_not_fit_is_answered(sample: AppTest) -> None:
    sample.session_state["model"] = model_presets()["Mixtral-8x7B"].model
    open_step(sample, routing="recorded")
    visit(sample, "what_if")
    assert "does not fit the recording" in sample.error[0].value.replace("\\", "")


def test_before_anything_was_swept(training: AppTest) -> None:
    assert "No sweep yet" in training.info[0].value and not training.error
    assert training.text_input[0].value.startswith("1, 2, 5, 10")
    pick(training, "sweep-kind", "degree")
    assert training.text_input[0].value == "1-16"
    pick(training, "sweep-kind", "range")
    forward = int(training.text_input[0].value.split(", ")[-1])
    assert training.text_input[0].value.startswith("0, 4, 5") and forward > 10, "it ends at the whole forward pass"


def test_sweeps_of_all_kinds_and_a_plan_to_open(training: AppTest) -> None:
    run(training, "micro_op", "0.1, 1")
    assert len(titles(training, "sweep-")) == 2 and "micro-ops" in titles(training, "sweep-")[0]
    table = training.dataframe[0].value
    assert table.iloc[:, 0].tolist() == ["0.1", "1", "reference", "reference", "reference"]
    assert {"All-reduces", "Experts on a GPU"} <= set(table.columns)

    run(training, "range", "0, 4, 99")
    whole = titles(training, "sweep-")[0]
    pick(training, "sweep-what-range", "forward")
    assert titles(training, "sweep-")[0] != whole and "Ranges up to" in titles(training, "sweep-")[0]

    job = run(training, "degree", "1-3")
    assert len(training.dataframe[0].value) == 7
    best = min(
        (candidate["point"] for candidate in job.result["candidates"] if candidate["point"]["value"]),
        key=lambda point: point["forward"],
    )
    assert any(f"This plan: degree {best['value']:.0f}" in caption.value.replace("\\", "") for caption in training.caption)
    press(training, "Open this plan")
    assert training.session_state["plan"] == best["plan_id"]
    assert button(training, "Open this plan").disabled
    (only,) = offered_plans(training)  # only the opened plan is a candidate
    assert only.startswith("One degree, ")

    pick(training, "sweep-kind", "micro_op")
    assert "micro-ops" in titles(training, "sweep-")[0], "the sweep before is still there"
    visit(training, "timeline")
    assert not training.error and any(metric.label == "Simulated step" for metric in training.metric)

    again = visit(studio(session=training.session_state["token"]).run(), "what_if")
    assert offered_plans(again), "found again by its address"


def test_sliders_and_sensitivity_of_a_step(training: AppTest) -> None:
    assert not titles(training, "what-if"), "no plan is open"
    assert "Once a plan is open" in said(training.caption) and not training.select_slider
    run(training, "degree", "1, 2")
    press(training, "Open this plan")
    assert len(titles(training, "what-if-totals")) == len(titles(training, "what-if-kinds")) == 1
    assert not titles(training, "what-if-gpus"), "all GPUs do the same"
    assert [slider.label for slider in training.select_slider] == [
        *("Network bandwidth", "Computation speed", "Latency", "Contention", "Batch")
    ]
    before = titles(training, "what-if")[0]
    training.select_slider(key="what-if-tokens").set_value(4.0).run()
    assert "instead of" in titles(training, "what-if")[0] != before and not training.error
    run_the_job(training, "Run the sensitivity study", "sensitivity")
    assert any("counts most" in title for title in titles(training, "what-if-tornado"))


def test_a_sweep_of_something_else_is_not_shown_as_if_it_were_of_this(training: AppTest) -> None:
    run(training, "degree", "1, 2")
    open_step(training, batch=4)
    training.run()
    assert not titles(training, "sweep-") and "another training step" in training.info[0].value
    open_step(training)
    training.run()
    assert len(titles(training, "sweep-")) == 2
    training.session_state["cluster"] = cluster_presets()["hgx-h100-8"].cluster
    training.run()
    assert not titles(training, "sweep-") and not training.exception


WRONG = {
    "": "give at least one value",
    "0": "0 is not between 1 and 16",
    "1e9": "is not between 1 and 16",
    "two": "'two' is not a number",
}


def test_wrong_values_are_answered_before_anything_starts(training: AppTest) -> None:
    cases = [*(("degree", *case) for case in WRONG.items()), ("micro_op", "nan", "nan is not between")]
    for kind, text, reason in [*cases, ("range", "1-500", "500 values are too many")]:
        pick(training, "sweep-kind", kind)
        training.text_input[0].set_value(text).run()
        assert reason in complaints(training)[0] and not training.exception
        assert button(training, "Run the sweep").disabled
    pick(training, "sweep-kind", "degree")
    training.text_input[0].set_value("1-3").run()
    assert not button(training, "Run the sweep").disabled
    training.multiselect[0].set_value([]).run()
    assert "at least one order" in complaints(training)[0] and button(training, "Run the sweep").disabled


def test_values_may_be_typed_in_many_ways() -> None:
    assert sweeps.values_of("10,20; 30  40,", "micro_op") == [10, 20, 30, 40]
    assert sweeps.values_of("1-4, 8", "degree") == [1, 2, 3, 4, 8]
    assert sweeps.values_of("0.5", "micro_op") == [0.5]
    for text in ("4-1", "1-999999", "1..3", "-5", "10 MB"):
        with pytest.raises(InputError, match="pipeline degrees: "):
            sweeps.values_of(text, "degree")
