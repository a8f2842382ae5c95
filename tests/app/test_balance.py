"""Every page that says how even a plan is says it with the same figures, computed here with NumPy alone."""

from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app.charts import optimise as charts
from engine.store import team
from engine.store.database import database
from engine.units import ratio
from tests.app.test_launch_page import MAIN, comes_from, problem_of, session_with_plans
from tests.app.test_pages import press, visit
from tests.app.test_review_page import save
from tests.app.test_step_page import said

pytestmark = pytest.mark.slow


@pytest.fixture
def app(own_data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The sample with a linear plan and one that sends shortest first on the same placement, the first of them open."""
    token, plans = session_with_plans(own_data_folder, 0)
    comes_from(None, monkeypatch)
    team.add_workspace(database(), "Autumn", "Ana")
    app = AppTest.from_file(MAIN, default_timeout=60)
    app.query_params["session"] = token
    app.plans = plans
    return visit(app, "timeline")


def percentiles(values: np.ndarray) -> str:
    """`p50 1.2×, …, worst 2×`."""
    over = np.percentile(values, [50, 75, 90, 95])
    names = ("p50", "p75", "p90", "p95", "worst")
    return ", ".join(f"{name} {ratio(value)}" for name, value in zip(names, [*over, values.max()], strict=True))


def factors(app: AppTest) -> np.ndarray:
    """float64[layer]: the overload factors of the open plan."""
    load = np.einsum("le,leg->lg", problem_of(app).workload.load, app.plans[0].placement.share)
    return load.max(axis=1) / load.mean(axis=1)


def overload(app: AppTest):
    return next(metric for metric in app.metric if metric.label == "Overload factor")


def test_on_every_page_of_a_plan(app: AppTest) -> None:
    of_layer = factors(app)
    mean, over = ratio(of_layer.mean()), percentiles(of_layer)

    shown = overload(app)
    assert shown.value == mean and over in shown.help
    assert f"imbalance ratio {of_layer.mean() - 1:.3g} (TensorRT-LLM)" in shown.help
    assert f"balancedness {(1 / of_layer).mean():.3g} (EPLB, vLLM, SGLang)" in shown.help

    visit(app, "optimise")
    table = app.dataframe[0].value
    assert set(table["Overload factor"]) == {f"{mean} · p95 {ratio(np.percentile(of_layer, 95))}"}
    assert f"Overload factor: {mean} on average over layers; {over}" in said(app.markdown)

    visit(app, "launch")
    assert not app.exception and f"Linear placement: {mean} on average over layers; {over}" in said(app.caption)

    visit(app, "review")
    save(app, "ours")
    assert overload(app).value == mean and over in overload(app).help
    press(app, "Compare")
    rows = app.dataframe[0].value.set_index("")
    assert rows.loc["Overload factor"].tolist() == [mean, mean, "1×"]
    over_layers = rows.loc["Overload p50 · p75 · p90 · p95"].tolist()
    assert over_layers[0] == over_layers[1] and over_layers[2] == "1 · 1 · 1 · 1×"
    assert over_layers[0].split(" · ")[0] + "×" == ratio(np.percentile(of_layer, 50))


def test_a_recordings_skew_over_layers(app: AppTest) -> None:
    load = problem_of(app).workload.load
    skew = load.max(axis=1) / load.mean(axis=1)
    visit(app, "workload")
    shown = {metric.label: metric for metric in app.metric}
    assert shown["Worst skew"].value == ratio(skew.max()) and percentiles(skew) in shown["Worst skew"].help
    low, high = np.percentile(skew, [50, 95])
    assert shown["Skew, p50 – p95"].value == f"{ratio(low)} – {ratio(high)}"


def test_imbalance_workloads_are_previewed_and_opened(app: AppTest) -> None:
    visit(app, "what_if")
    app.segmented_control(key="what-if-study").set_value("synthetic")
    app.run()
    recipe = app.selectbox(key="synthetic-recipe")
    assert recipe.options[0] == "Power law and affinity" and recipe.options[7] == "W6 rotating hotspot"
    recipe.set_value("w0").run()
    labels = {metric.label: metric.value for metric in app.metric}
    assert labels["Worst skew"] == "1×" and "Skew of a step" not in labels
    assert not any(slider.label in ("Skew", "Affinity") for slider in app.slider)
    app.selectbox(key="synthetic-recipe").set_value("w6").run()
    labels = {metric.label: metric.value for metric in app.metric}
    least = float(labels["Skew of a step"].split("×")[0])
    assert float(labels["Worst skew"].removesuffix("×")) < 1.2 and least > 3
    assert "Isolates a plan that has grown stale" in said(app.caption)
    app.number_input(key="synthetic-steps").set_value(6).run()
    press(app, "Open it")
    assert not app.exception and not app.error
    name = "synthetic W6_rotating_hotspot, 16,384 tokens in 6 steps"
    assert app.session_state["workloads"][app.session_state["workload"]] == name


def test_tips_of_a_front():
    figures = {"mean": 1.5, "p50": 1.4, "p75": 1.6, "p90": 1.8, "p95": 1.9, "max": 2.0}
    point = {"kept_share": 0.4, "balancedness": 0.6, "weight": 0.5, "seconds": 1e-3}
    new, old = (charts.front([point | {"overload": known}], {}).data[0].text[0] for known in (figures, None))
    assert new == f"{old}<br>overload factor 1.5×; p50 1.4×, p75 1.6×, p90 1.8×, p95 1.9×, worst 2×"


def test_tips_of_plans_on_other_recordings():
    """With the percentiles of balancedness where they are known: not of results that an older version kept."""
    figures = {"mean": 1.5, "p50": 1.4, "p75": 1.6, "p90": 1.8, "p95": 1.9, "max": 2.0}
    table, overload = [[0.7, 0.6], [None, None]], [[figures, figures], [None, None]]
    tips = charts.matrix(["a", "b"], table, "balancedness", overload=overload).data[0].text
    assert tips[0][1] == (
        "made from a<br>scored on b: 0.6<br>overload factor 1.5×; p50 1.4×, p75 1.6×, p90 1.8×, p95 1.9×, worst 2×"
    )
    assert tips[1][0] == "made from b<br>scored on a: …"
    assert "overload" not in str(charts.matrix(["a", "b"], table, "balancedness").data[0].text)
    assert "overload" not in str(charts.matrix(["a", "b"], table, "seconds", overload=overload).data[0].text)
