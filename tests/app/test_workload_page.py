"""A recording on the pages: its faults with their remedies, and its balance, the same on every page."""

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app.charts import optimise as charts
from engine import store
from engine.store import team
from engine.store.database import database
from engine.units import ratio
from engine.workload import DECODE, PREFILL, Finding, Origin, RoutingTrace
from tests.cases.pages import press, run, said, visit
from tests.cases.reviews import save
from tests.cases.samples import sample
from tests.cases.sessions import open_recording, problem_of


@pytest.fixture
def app(sample: AppTest) -> AppTest:
    return visit(sample, "workload")


def opened(app: AppTest, trace: RoutingTrace) -> AppTest:
    open_recording(app, trace)
    return run(app)


def recording(app: AppTest) -> RoutingTrace:
    return store.load_workload(app.session_state["workload"])


def labels(app: AppTest) -> list[str]:
    return [button.label for button in app.button]


def remedies(app: AppTest) -> list[str]:
    return [button.key for button in app.button if (button.key or "").startswith("remedy-")]


def test_profile_rows_are_cut_by_a_button_and_a_clean_recording_is_saved_as_a_file(app: AppTest) -> None:
    assert not remedies(app) and "Write the file" in labels(app)
    next(box for box in app.selectbox if box.key == "save-recording-as").set_value("sglang-statistics")
    press(app, "Write the file")
    assert "Left out" in said(app.caption) and not app.error
    same = np.repeat(sample("alpha-code").experts[:1], 8448, axis=0)
    opened(app, RoutingTrace("warm", np.concatenate([same, sample("alpha-code").experts]), 16))
    button = next(button for button in app.button if button.key == "remedy-cut-profile-rows")
    assert button.label.startswith("Cut the first 8,4")
    press(app, button.label)
    assert abs(recording(app).tokens - sample("alpha-code").tokens) <= 1
    assert "warm" in app.session_state["workloads"].values(), "the recording as it was stays"
    assert button.label not in labels(app)
    assert any("skew" in message.value and "Cut 8,4" in message.value for message in app.success)


def test_a_remedy_that_is_not_known_here_has_no_button(app: AppTest) -> None:
    trace = sample("alpha-code")
    finding = Finding(severity="warning", code="of-tomorrow", message="Tomorrow's fault.", remedy="mend-of-tomorrow")
    opened(app, RoutingTrace("newer", trace.experts, trace.num_experts, origin=Origin(format="npz", findings=(finding,))))
    assert "Tomorrow" in said(app.warning)
    assert not remedies(app)


def test_one_phase_is_kept_by_a_button(app: AppTest) -> None:
    trace = sample("alpha-code")
    phase = np.where(trace.experts[:, 0, 0] < 8, DECODE, PREFILL).astype(np.int8)
    opened(app, RoutingTrace("mixed", trace.experts, trace.num_experts, phase=phase))
    press(app, "Keep the decode")
    assert recording(app).tokens == int((phase == DECODE).sum())


@pytest.fixture
def compared(two_plans: AppTest) -> AppTest:
    """A linear plan, which is open, and one that sends shortest first on the same placement."""
    team.add_workspace(database(), "Autumn", "Ana")
    return visit(two_plans, "timeline")


def percentiles(values: np.ndarray) -> str:
    """`p50 1.2×, …, worst 2×`."""
    return ", ".join(
        [*(f"p{at} {ratio(np.percentile(values, at))}" for at in (50, 75, 90, 95)), f"worst {ratio(values.max())}"]
    )


def overload(compared: AppTest):
    return next(metric for metric in compared.metric if metric.label == "Overload factor")


def test_on_every_page_of_a_plan(compared: AppTest) -> None:
    load = np.einsum("le,leg->lg", problem_of(compared).workload.load, compared.plans[0].placement.share)
    of_layer = load.max(axis=1) / load.mean(axis=1)
    mean, over = ratio(of_layer.mean()), percentiles(of_layer)

    shown = overload(compared)
    assert shown.value == mean and over in shown.help
    assert f"imbalance ratio {of_layer.mean() - 1:.3g} (TensorRT-LLM)" in shown.help
    assert f"balancedness {(1 / of_layer).mean():.3g} (EPLB, vLLM, SGLang)" in shown.help

    visit(compared, "optimise")
    table = compared.dataframe[0].value
    assert set(table["Overload factor"]) == {f"{mean} · p95 {ratio(np.percentile(of_layer, 95))}"}
    assert f"Overload factor: {mean} on average over layers; {over}" in said(compared.markdown)

    visit(compared, "launch")
    assert not compared.exception and f"Linear placement: {mean} on average over layers; {over}" in said(compared.caption)

    visit(compared, "review")
    save(compared, "ours")
    assert overload(compared).value == mean and over in overload(compared).help
    press(compared, "Compare")
    rows = compared.dataframe[0].value.set_index("")
    assert rows.loc["Overload factor"].tolist() == [mean, mean, "1×"]
    over_layers = rows.loc["Overload p50 · p75 · p90 · p95"].tolist()
    assert over_layers[0] == over_layers[1] and over_layers[2] == "1 · 1 · 1 · 1×"
    assert over_layers[0].split(" · ")[0] + "×" == ratio(np.percentile(of_layer, 50))


def test_a_recordings_skew_over_layers(compared: AppTest) -> None:
    load = problem_of(compared).workload.load
    skew = load.max(axis=1) / load.mean(axis=1)
    visit(compared, "workload")
    shown = {metric.label: metric for metric in compared.metric}
    assert shown["Worst skew"].value == ratio(skew.max()) and percentiles(skew) in shown["Worst skew"].help
    low, high = np.percentile(skew, [50, 95])
    assert shown["Skew, p50 – p95"].value == f"{ratio(low)} – {ratio(high)}"


def test_imbalance_workloads_are_previewed_and_opened(compared: AppTest) -> None:
    visit(compared, "what_if")
    compared.segmented_control(key="what-if-study").set_value("synthetic")
    compared.run()
    recipe = compared.selectbox(key="synthetic-recipe")
    assert recipe.options[0] == "Power law and affinity" and recipe.options[7] == "W6 rotating hotspot"
    recipe.set_value("w0").run()
    labels = {metric.label: metric.value for metric in compared.metric}
    assert labels["Worst skew"] == "1×" and "Skew of a step" not in labels
    assert not any(slider.label in ("Skew", "Affinity") for slider in compared.slider)
    compared.selectbox(key="synthetic-recipe").set_value("w6").run()
    labels = {metric.label: metric.value for metric in compared.metric}
    least = float(labels["Skew of a step"].split("×")[0])
    assert float(labels["Worst skew"].removesuffix("×")) < 1.2 and least > 3
    assert "Isolates a plan that has grown stale" in said(compared.caption)
    compared.number_input(key="synthetic-steps").set_value(6).run()
    press(compared, "Open it")
    assert not compared.exception and not compared.error
    name = "synthetic W6_rotating_hotspot, 16,384 tokens in 6 steps"
    assert compared.session_state["workloads"][compared.session_state["workload"]] == name


def test_tips_of_a_front_and_of_plans_on_other_recordings():
    """With the percentiles of balancedness where they are known: not of results that an older version kept."""
    figures = {"mean": 1.5, "p50": 1.4, "p75": 1.6, "p90": 1.8, "p95": 1.9, "max": 2.0}
    added = "<br>overload factor 1.5×; p50 1.4×, p75 1.6×, p90 1.8×, p95 1.9×, worst 2×"
    point = {"kept_share": 0.4, "balancedness": 0.6, "weight": 0.5, "seconds": 1e-3}
    new, old = (charts.front([point | {"overload": known}], {}).data[0].text[0] for known in (figures, None))
    assert new == old + added
    table, overload = [[0.7, 0.6], [None, None]], [[figures, figures], [None, None]]
    tips = charts.matrix(["a", "b"], table, "balancedness", overload=overload).data[0].text
    assert tips[0][1] == f"made from a<br>scored on b: 0.6{added}"
    assert tips[1][0] == "made from b<br>scored on a: …"
    assert "overload" not in str(charts.matrix(["a", "b"], table, "balancedness").data[0].text)
    assert "overload" not in str(charts.matrix(["a", "b"], table, "seconds", overload=overload).data[0].text)
