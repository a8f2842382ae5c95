"""The goal of serving, from its card to the timeline, without a browser."""

import json

import pytest
from streamlit.testing.v1 import AppTest

from app import cached, model_catalogue
from app.charts import serving as charts
from app.charts import stacks
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.costs import Datasheet
from engine.formats import read_sizes
from engine.jobs import runner
from engine.plan import SendOrder
from engine.problem import make_problem
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import usual_serving, usual_sizes
from engine.serving.step import ServingStep
from engine.simulate.serving import serve
from engine.systems import SYSTEMS, run
from engine.systems.pieces import linear_placement
from engine.training import balanced_load
from engine.units import digits, seconds
from tests.cases.cli import ALPHA
from tests.cases.pages import (
    buttons,
    enter,
    field,
    gain,
    metrics,
    plan_the_sample,
    press,
    run_the_job,
    said,
    tick,
    upload,
    visit,
)
from tests.costs.silicon import needs_tables

pytestmark = pytest.mark.usefixtures("warm_python")

SERVE = "Serving step"


@pytest.fixture
def app(sample: AppTest) -> AppTest:
    """The sample, opened."""
    return sample


def serving(app: AppTest, preset: str = "hgx-h200-8") -> AppTest:
    """The page with the goal chosen and GPUs of one type."""
    return press(press(visit(app, "optimise"), SERVE), preset)


def serving_unmeasured(app: AppTest) -> None:
    """The page with the goal chosen and GPUs whose operators nobody measured: those of others take a second to load."""
    cluster = cluster_presets()["lancet-p3dn-2-nodes"].cluster
    app.session_state["cluster"] = cluster.model_copy(update={"nodes": cluster.nodes[:1]})
    press(visit(app, "optimise"), SERVE)


def test_a_mixed_cluster_is_answered_with_clusters_that_can_serve(app: AppTest) -> None:
    press(visit(app, "optimise"), SERVE)
    assert "GPUs of one type" in said(app.info) and "RTX 2080 Ti" in said(app.info)
    assert not app.metric and "Run" not in buttons(app)
    press(app, "hgx-h200-8")
    assert app.session_state["serving"] == usual_serving()
    assert metrics(app).keys() >= {"Simulated time per token", "Tokens/s per GPU", "Above the order bound"}
    assert gain(app) == {"Deployed now": "1×"}


def test_the_figures_of_the_table_are_those_of_serve(app: AppTest) -> None:
    plan_the_sample(serving(app))
    table = app.dataframe[0].value
    assert table["Plan"].tolist()[:2] == ["Linear placement", "Aurora"] and len(table) == 4
    model, cluster = app.session_state["model"], app.session_state["cluster"]
    problem = make_problem(store.load_workload(app.session_state["workload"]), cluster, model, Datasheet())
    sizes, step = usual_sizes(model), usual_serving()
    source = RooflineOperators(model, sizes, cluster.gpus[0])
    (job,) = runner.jobs(store.data_folder(), "optimise")
    plans = {candidate.plan.name: candidate.plan for candidate in cached.answer_of(job).candidates}
    blocks = {"placement": linear_placement(problem), "send_order": SendOrder(mode="concurrent")}
    linear = plans["Linear placement"].model_copy(update=blocks)
    deployed, best = (serve(plan, problem, step, source, sizes).figures for plan in (linear, plans["Aurora"]))
    time = next(column for column in table if column.startswith("Time per token"))
    factor = {"ms": 1e-3, "µs": 1e-6}[time.split(", ")[1].split(" ")[0]]
    for row in table.to_dict("records"):
        figures = serve(plans[row["Plan"]], problem, step, source, sizes).figures
        assert row[time] == digits(figures.seconds / factor)
        assert row["Tokens/s/GPU"] == digits(64 / figures.seconds)
        gained = f"{100 * (deployed.seconds / figures.seconds - 1):+.1f} %"
        assert row["Gain over Linear placement"] == ("deployed" if row["Plan"] == "Linear placement" else gained)
        assert row["Room for sequences"] == f"{figures.memory.most_sequences(step):,}"
    times = table[time].astype(float).tolist()
    assert times[1:] == sorted(times[1:]) and times[-1] > times[0] >= times[1]
    assert gain(app) == {"Gain over Linear placement": f"{digits(deployed.seconds / best.seconds)}×"}

    app.session_state["in_use"] = plans["Random order (RCS)"].id
    app.run()
    table = app.dataframe[0].value
    assert table["Plan"].iloc[0] == "Random order (RCS)" and table[""].iloc[0] == ""
    assert table["Gain over Random order (RCS)"].iloc[0] == "deployed"
    assert float(gain(app)["Gain over Random order (RCS)"].rstrip("×")) > 1
    visit(app, "timeline")
    assert metrics(app)["Simulated time per token"] == seconds(best.seconds)
    assert "MoE layers" in said(app.caption) and not app.error
    for page in ("what_if", "launch"):
        assert "this page shows the plan's MoE layers as inference" in said(visit(app, page).caption)
    press(visit(app, "optimise"), "Inference latency of one model")
    assert app.dataframe[0].value["Plan"].iloc[1] == "Aurora" and "Simulated time per token" not in metrics(app)
    press(app, SERVE)
    assert len(app.dataframe[0].value) == 4


def test_a_plan_that_cannot_be_served_is_not_opened_by_itself(app: AppTest) -> None:
    tick(serving(app), "ExFlow", "Linear")
    field(app, "Time limit (s)").set_value(0.1)
    run_the_job(app)
    assert app.dataframe[0].value["Plan"].tolist() == ["Linear placement"]
    assert "ExFlow is not in the table: the plan ExFlow is executed context-coherently" in said(app.caption)
    assert app.dataframe[0].value[""].tolist() == ["▸"]


def test_what_cannot_be_is_said_the_last_step_stays_and_every_model_has_its_own(app: AppTest) -> None:
    serving_unmeasured(app)
    enter(app, "Overlap", "two-batch")
    assert app.session_state["serving"].overlap == "two-batch"
    enter(app, "Sequences per GPU", 31)
    assert "31 sequences on a GPU are odd" in said(app.error) and "The last valid step stays" in said(app.error)
    assert app.session_state["serving"].sequences == 64
    enter(app, "Sequences per GPU", 32)
    assert not app.error and app.session_state["serving"].sequences == 32
    enter(app, "Sequences per GPU", 100_000)
    assert "It does not fit" in said(app.warning) and "At most" in said(app.warning)
    enter(app, "Sequences per GPU", 16)
    alpha = app.session_state["model"]
    for model, sequences in ((model_presets()["Qwen3-30B-A3B"].model, 64), (alpha, 16)):
        app.session_state["model"] = model
        app.run()
        assert app.session_state["serving"].sequences == sequences
    enter(app, "Step", "prefill")
    assert app.session_state["serving"].phase == "prefill" and "Simulated time to first token" in metrics(app)
    assert app.session_state["serving"].sequences == usual_serving("prefill").sequences
    assert not any(box.label == "Output, tokens" for box in app.number_input)


def test_an_uploaded_config_tells_the_sizes_and_may_be_of_another_model(app: AppTest) -> None:
    serving_unmeasured(app)
    assert "beside its experts are assumed" in said(app.info)
    assumed = metrics(app)["Simulated time per token"]
    visit(app, "workload")
    config = json.dumps(ALPHA).encode()
    assert not upload(app, "recordings", {"alpha.json": config}).error, said(app.error)
    visit(app, "optimise")
    assert not app.info or "assumed" not in said(app.info)
    assert metrics(app)["Simulated time per token"] != assumed
    assert "sizes: the uploaded config.json" in said(app.caption)
    digest = next(iter(app.session_state["configs"].values()))
    path = store.config_path(digest)
    assert path.read_bytes() == config and read_sizes(path).vocabulary == 1000
    path.unlink()
    app.run()
    assert "no longer in the data folder; upload it again" in said(app.error)
    visit(app, "workload")
    upload(app, "recordings", {"other.json": json.dumps(ALPHA | {"num_experts": 32, "_name_or_path": "other"})})
    assert not app.error and app.session_state["model"].experts == 32
    visit(app, "optimise")
    assert "Balanced routing is assumed" in said(app.caption) and "Simulated time per token" in metrics(app)


@needs_tables
def test_a_model_of_the_catalogue_needs_no_recording(app: AppTest) -> None:
    enter(serving(app), "Catalogue of models", "Qwen/Qwen3-30B-A3B")
    assert app.session_state["configs"][app.session_state["model"].digest] == "Qwen/Qwen3-30B-A3B"
    assert "assumed: no recording of this model is open" in said(app.caption)
    assert "compiled engine for sglang on H200" in said(app.caption)
    assert "fused kernels of SGLang" in said(app.caption) and not app.error
    enter(app, "Catalogue of models", "Qwen/Qwen3.5-35B-A3B")
    assert "linear, state-space or other sparse attention" in said(app.error) and not app.metric


def test_without_the_package_the_catalogue_says_so(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_catalogue, "package_folder", lambda: None)
    visit(app, "workload")
    assert "package aiconfigurator-core" in said(app.caption)
    assert not any(box.label == "Catalogue of models" for box in app.selectbox)


def test_the_chart_has_every_second_of_the_step() -> None:
    model, cluster = model_presets()["Qwen3-30B-A3B"].model, cluster_presets()["hgx-h200-8"].cluster
    problem = make_problem(balanced_load(model), cluster, model, Datasheet())
    sizes = usual_sizes(model)
    plan = run(SYSTEMS["linear"], problem).result.solution
    source = RooflineOperators(model, sizes, cluster.gpus[0])
    for overlap in ("none", "two-batch"):
        step = ServingStep(phase="prefill", sequences=4, context=2000, overlap=overlap)
        figures = serve(plan, problem, step, source, sizes).figures
        figure = charts.parts({"<b>plan</b>": figures, "linear": figures})
        bars = [trace for trace in figure.data if trace.type == "bar"]
        assert set(figures.parts) <= {kind for kind, *_ in charts.PARTS}
        factor = 1e-3 if "ms" in figure.layout.xaxis.title.text else 1.0
        assert sum(bar.x[0] for bar in bars) * factor == pytest.approx(figures.seconds + figures.hidden)
        assert "<b>" not in figure.layout.title.text and "takes as long as linear" in figure.layout.title.text
        assert max(len(trace.name) for trace in figure.data if trace.showlegend is not False) <= stacks.ENTRY
        above, other = (note.text for note in figure.layout.annotations)
        assert above.startswith(f"&lt;b&gt;plan&lt;/b&gt;: {seconds(figures.seconds)}") and other.startswith("linear: ")
        assert ("hidden" in above) == (overlap != "none") and above.endswith(f"bound {seconds(figures.bound)}")
