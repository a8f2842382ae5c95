"""The What-if page in every state it can be met in, without a browser: sliders, studies, a synthetic recording, sweeps."""

import pytest
from streamlit.testing.v1 import AppTest

from app.what_if import studies, sweeps
from engine.catalogue import cluster_presets
from engine.compare.contention import CONTENTIONS
from engine.compare.what_if import Change, changed
from engine.errors import InputError
from engine.jobs import runner
from engine.simulate import simulate
from engine.training import TrainingStep
from engine.units import seconds
from tests.cases import pages
from tests.cases.problems import small
from tests.cases.samples import linear_plan
from tests.cases.sessions import open_plan
from tests.strategies import cluster_of, make_gpu, make_model

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture
def page(small_recording: AppTest) -> AppTest:
    return small_recording


def finish(page: AppTest, kind: str, label: str) -> runner.Job:
    """Run a study to its end; its result stands on the page without an error."""
    job = pages.run_the_job(page, label, kind)
    assert not page.error
    return job


def test_the_sample_without_a_plan(app: AppTest) -> None:
    pages.visit(pages.open_sample(app), "what_if")
    assert len(pages.titles(app, "what-if")) == 3 and pages.titles(app, "what-if-totals")[0].startswith(
        "Linear placement takes"
    )
    assert "No plan is open" in pages.said(app.caption)
    assert pages.button(app, "Reset all sliders").disabled and pages.button(app, "Replan for this change").disabled


def test_a_slider_shows_what_the_engine_says(page: AppTest) -> None:
    problem = small()
    assert [slider.label for slider in page.select_slider] == [
        *("Network bandwidth", "Computation speed", "Latency", "Contention", "Tokens", "Model width")
    ]
    page.select_slider(key="what-if-network").set_value(2.0).run()
    page.slider(key="what-if-noise").set_value(30).run()
    page.selectbox(key="what-if-dtype").set_value("fp8").run()
    assert not page.exception and not page.error
    plan, change = linear_plan(problem), Change(network=2, noise=0.3, dtype="fp8")
    now, then = simulate(plan, problem).total, simulate(plan, changed(problem, change)).total
    assert pages.titles(page, "what-if-totals") == [f"Linear placement takes {seconds(then)} instead of {seconds(now)}"]
    later = pages.visit(pages.studio(session=page.session_state["token"]).run(), "what_if")
    for tab in (page, later):
        assert pages.titles(tab, "what-if-totals") == [f"Linear placement takes {seconds(then)} instead of {seconds(now)}"]
        pages.press(tab, "Reset all sliders")
        assert pages.titles(tab, "what-if-totals") == [f"Linear placement takes {seconds(now)}"]
        pages.visit(tab, "timeline")
        pages.visit(tab, "what_if")
        # A widget of the same key would still show its old position in the browser.
        assert tab.slider(key="what-if-noise-1").value == 0


def test_a_plan_for_a_change_opens_beside_and_a_change_that_cannot_be_is_answered(page: AppTest) -> None:
    page.select_slider(key="what-if-network").set_value(0.25).run()
    job = finish(page, "replan", "Replan for this change")
    assert job.request.arguments["system"] == "aurora"
    pages.press(page, "Open the new plan")
    assert page.session_state["plan"] == job.result["candidates"][0]["point"]["plan_id"]
    assert any("Aurora, network 0" in name for name in pages.offered_plans(page))
    assert len(pages.titles(page, "what-if")) == 3
    tight = make_gpu(memory=2.5 * 3 * small().model.bytes_per_expert / 0.9)
    page.session_state["plan"], page.session_state["cluster"] = None, cluster_of(*(tight for _ in range(4)))
    assert not page.run().error
    page.select_slider(key="what-if-width").set_value(16.0).run()
    assert "This change cannot be" in page.error[0].value and "add GPUs" in page.error[0].value
    assert len(pages.titles(page, "what-if")) == 3 and not page.exception


def test_one_slider_is_swept_beside_plans_made_anew_and_contention_is_slid_swept_and_studied(page: AppTest) -> None:
    opened = open_plan(page, "aurora-printed", {})  # its own system plans anew, which is quick
    page.run()
    assert "No sweep yet" in page.info[0].value
    page.selectbox(key="what-if-field").set_value("latency").run()
    job = finish(page, "curve", "Run the sweep")
    assert len(job.result["points"]) == job.result["of"] == 8 * 2
    assert pages.titles(page, "what-if-curve")[0].startswith(f"Keeping {opened.name} costs at most")
    pages.put(page, plan=None, plan_jobs=[])
    page.checkbox(key="what-if-anew").uncheck().run()
    for swept, values in (("noise", [0, 0.15, 0.3, 0.45, 0.6, 0.75]), ("contention", list(CONTENTIONS))):
        page.selectbox(key="what-if-field").set_value(swept).run()
        job = finish(page, "curve", "Run the sweep")
        assert [point["value"] for point in job.result["points"]] == values

    problem = small()
    plan = linear_plan(problem)
    page.select_slider(key="what-if-contention").set_value(0.5).run()
    then = simulate(plan, changed(problem, Change(contention=0.5))).total
    assert then > simulate(plan, problem).total
    assert f"takes {seconds(then)} instead of" in pages.titles(page, "what-if-totals")[0]
    assert "makes bytes there take 50 % longer" in pages.said(page.caption)
    pages.press(page, "Reset all sliders")
    assert page.select_slider(key="what-if-contention-1").value == 0
    pages.pick(page, "what-if-study", "contention")
    job = finish(page, "contention", "Run the contention study")
    assert 0.2 < job.result["pays_from"] < 0.5
    assert pages.titles(page, "what-if-pays")[0].startswith("Ordering pays from 35.2 % contention on")
    assert "orders of this placement can save at most" in pages.said(page.caption)


def test_studies_fill_in_and_are_told_from_those_of_something_else(page: AppTest) -> None:
    pages.pick(page, "what-if-study", "sensitivity")
    finish(page, "sensitivity", "Run the sensitivity study")
    assert "counts most" in pages.titles(page, "what-if-tornado")[0]
    pages.put(page, cluster=cluster_of(*(make_gpu() for _ in range(4))))
    assert not pages.titles(page, "what-if-tornado") and "another plan" in page.info[0].value
    page.session_state["cluster"] = small().cluster

    pages.pick(page, "what-if-study", "imprecision")
    page.text_input(key="what-if-levels").set_value("0, many").run()
    assert "is no list of percentages" in page.error[0].value.replace("\\", "")
    assert pages.button(page, "Run the imprecision study").disabled
    page.text_input(key="what-if-levels").set_value("0, 75").run()
    page.number_input(key="what-if-seeds").set_value(2).run()
    page.number_input(key="what-if-limit").set_value(0.5).run()
    job = finish(page, "imprecision", "Run the imprecision study")
    assert len(job.result["points"]) == 4 * (1 + 2)
    assert "At 75 % noise" in pages.titles(page, "what-if-imprecise")[0] and pages.titles(page, "what-if-speed-ups")


def test_drift_names_the_best_policy_and_its_gain(page: AppTest) -> None:
    pages.pick(page, "what-if-study", "drift")
    assert not [widget for widget in page.multiselect if widget.label == "In order of time"], "one recording is cut into parts"
    page.number_input(key="drift-parts").set_value(3).run()
    page.selectbox(key="drift-system").set_value("eplb").run()
    job = finish(page, "drift", "Find the best policy")
    found = job.result["drift"]
    assert len(found["windows"]) == found["of"] == 2 and found["limit"] <= found["policies"][0]["total"]
    assert ("Never moving" in pages.titles(page, "what-if-drift")[0]) == (found["policies"][0]["rule"] == "never")
    assert "than never moving" in pages.said(page.markdown) or "Never moving is best" in pages.said(page.markdown)
    assert "moves for nothing" in pages.said(page.caption)


def test_a_synthetic_workload_is_previewed_opened_and_called_so_and_suits_a_model_without_a_recording(page: AppTest) -> None:
    pages.pick(page, "what-if-study", "synthetic")
    flat = float(pages.metrics(page)["Worst skew"].removesuffix("×"))
    page.slider(key="synthetic-skew").set_value(2.0).run()
    page.slider(key="synthetic-affinity").set_value(100).run()
    assert float(pages.metrics(page)["Worst skew"].removesuffix("×")) > flat
    assert pages.metrics(page)["Kept, with followers together"] == "100 %"
    assert not pages.press(page, "Open it").error
    name = "synthetic, skew 2, affinity 1, 16,384 tokens"
    assert page.session_state["workloads"][page.session_state["workload"]] == name
    assert page.toast and "not recorded" in page.toast[0].value
    pages.put(page, model=make_model(2, 4, 2))
    assert "does not fit" in page.error[0].value and not pages.titles(page, "what-if") and not page.exception
    assert not pages.press(page, "Open it").error and len(pages.titles(page, "what-if")) == 3
    assert "tokens" in page.session_state["workloads"][page.session_state["workload"]]


def test_a_traffic_matrix_has_no_larger_cluster(sample: AppTest) -> None:
    pages.visit(pages.press(pages.visit(sample, "workload"), "Traffic 8 × 8"), "what_if")
    assert len(pages.titles(sample, "what-if")) == 3, "and sliders work on it"
    sample.slider(key="what-if-noise").set_value(50).run()
    assert not sample.error and not sample.exception
    for question, reason in (("size", "between its own GPUs"), ("capacity", "fixed number of GPUs")):
        pages.ask_capacity(sample, question)
        assert reason in sample.info[0].value


def test_two_models(page: AppTest) -> None:
    problem = small()
    pages.put(page, second=problem.workload.digest, model_of={problem.workload.digest: problem.model})
    page.select_slider(key="what-if-network").set_value(4.0).run()
    assert "instead of" in pages.titles(page, "what-if-totals")[0] and not page.error and not page.exception


# A training step.


STEP = TrainingStep(batch=8, sequence_length=16, heads=4, dense_d_ff=96, vocabulary=2000)


@pytest.fixture
def training(app: AppTest) -> AppTest:
    """A small training step, opened on its page; no recording."""
    app.session_state["model"] = make_model(2, 4)
    app.session_state["cluster"] = cluster_of(*(make_gpu() for _ in range(4)), latency=1e-4)
    open_step(app)
    return pages.visit(app, "what_if")


def open_step(app: AppTest, **more) -> None:
    """Put the step into the session, as described for the open model."""
    step = STEP.model_copy(update=more)
    app.session_state["step"] = step
    app.session_state["steps"] = {app.session_state["model"].digest: step}


def sweep(app: AppTest, kind: str, values: str) -> runner.Job:
    """Sweep some values to the end."""
    pages.pick(app, "sweep-kind", kind)
    app.text_input[0].set_value(values).run()
    return pages.run_the_job(app, "Run the sweep", "sweep")


def test_before_anything_was_swept(training: AppTest) -> None:
    assert "No sweep yet" in training.info[0].value and not training.error
    assert training.text_input[0].value.startswith("1, 2, 5, 10")
    pages.pick(training, "sweep-kind", "degree")
    assert training.text_input[0].value == "1-16"
    pages.pick(training, "sweep-kind", "range")
    forward = int(training.text_input[0].value.split(", ")[-1])
    assert training.text_input[0].value.startswith("0, 4, 5") and forward > 10, "it ends at the whole forward pass"


def test_sweeps_of_all_kinds_and_a_plan_to_open(training: AppTest) -> None:
    sweep(training, "micro_op", "0.1, 1")
    assert len(pages.titles(training, "sweep-")) == 2 and "micro-ops" in pages.titles(training, "sweep-")[0]
    table = training.dataframe[0].value
    assert table.iloc[:, 0].tolist() == ["0.1", "1", "reference", "reference", "reference"]
    assert {"All-reduces", "Experts on a GPU"} <= set(table.columns)

    sweep(training, "range", "0, 4, 99")
    whole = pages.titles(training, "sweep-")[0]
    pages.pick(training, "sweep-what-range", "forward")
    assert pages.titles(training, "sweep-")[0] != whole and "Ranges up to" in pages.titles(training, "sweep-")[0]

    job = sweep(training, "degree", "1-3")
    assert len(training.dataframe[0].value) == 7
    points = [candidate["point"] for candidate in job.result["candidates"]]
    best = min((point for point in points if point["value"]), key=lambda point: point["forward"])
    assert f"This plan: degree {best['value']:.0f}" in pages.said(training.caption)
    pages.press(training, "Open this plan")
    assert training.session_state["plan"] == best["plan_id"]
    assert pages.button(training, "Open this plan").disabled
    (only,) = pages.offered_plans(training)  # only the opened plan is a candidate
    assert only.startswith("One degree, ")

    pages.pick(training, "sweep-kind", "micro_op")
    assert "micro-ops" in pages.titles(training, "sweep-")[0], "the sweep before is still there"
    pages.visit(training, "timeline")
    assert not training.error and any(metric.label == "Simulated step" for metric in training.metric)

    again = pages.visit(pages.studio(session=training.session_state["token"]).run(), "what_if")
    assert pages.offered_plans(again), "found again by its address"


def test_sliders_and_sensitivity_of_a_step(training: AppTest) -> None:
    assert not pages.titles(training, "what-if"), "no plan is open"
    assert "Once a plan is open" in pages.said(training.caption) and not training.select_slider
    sweep(training, "degree", "1, 2")
    pages.press(training, "Open this plan")
    assert len(pages.titles(training, "what-if-totals")) == len(pages.titles(training, "what-if-kinds")) == 1
    assert not pages.titles(training, "what-if-gpus"), "all GPUs do the same"
    assert [slider.label for slider in training.select_slider] == [
        *("Network bandwidth", "Computation speed", "Latency", "Contention", "Batch")
    ]
    before = pages.titles(training, "what-if")[0]
    training.select_slider(key="what-if-tokens").set_value(4.0).run()
    assert "instead of" in pages.titles(training, "what-if")[0] != before and not training.error
    pages.run_the_job(training, "Run the sensitivity study", "sensitivity")
    assert any("counts most" in title for title in pages.titles(training, "what-if-tornado"))


def test_a_sweep_of_something_else_is_not_shown_as_if_it_were_of_this(training: AppTest) -> None:
    sweep(training, "degree", "1, 2")
    open_step(training, batch=4)
    training.run()
    assert not pages.titles(training, "sweep-") and "another training step" in training.info[0].value
    open_step(training)
    training.run()
    assert len(pages.titles(training, "sweep-")) == 2
    pages.put(training, cluster=cluster_presets()["hgx-h100-8"].cluster)
    assert not pages.titles(training, "sweep-") and not training.exception


def test_wrong_values_are_answered_before_anything_starts(training: AppTest) -> None:
    for kind, text, reason in (
        ("degree", "", "give at least one value"),
        ("degree", "0", "0 is not between 1 and 16"),
        ("degree", "two", "'two' is not a number"),
        ("micro_op", "nan", "nan is not between"),
        ("range", "1-500", "500 values are too many"),
    ):
        pages.pick(training, "sweep-kind", kind)
        training.text_input[0].set_value(text).run()
        assert reason in pages.complaints(training)[0] and not training.exception
        assert pages.button(training, "Run the sweep").disabled
    pages.pick(training, "sweep-kind", "degree")
    training.text_input[0].set_value("1-3").run()
    assert not pages.button(training, "Run the sweep").disabled
    training.multiselect[0].set_value([]).run()
    assert "at least one order" in pages.complaints(training)[0] and pages.button(training, "Run the sweep").disabled


def test_values_and_percentages_may_be_typed_in_many_ways() -> None:
    assert studies.levels_of("0, 25 %; 75%") == [0, 0.25, 0.75]
    for text in ("", "200", "-5", "a"):
        with pytest.raises(InputError):
            studies.levels_of(text)
    assert sweeps.values_of("10,20; 30  40,", "micro_op") == [10, 20, 30, 40]
    assert sweeps.values_of("1-4, 8", "degree") == [1, 2, 3, 4, 8]
    assert sweeps.values_of("0.5", "micro_op") == [0.5]
    for text in ("4-1", "1-999999", "1..3", "-5", "10 MB"):
        with pytest.raises(InputError, match="pipeline degrees: "):
            sweeps.values_of(text, "degree")
