"""The training step from the goal to the timeline, and the choice of costs, without a browser."""

import json
from dataclasses import replace

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import cached
from app.cluster import measuring
from app.optimise import step as step_form
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.compare.sensitivity import operators_of
from engine.costs import CollectiveTimes, Combined, Datasheet, GemmTimes, MeasuredTimes, Profiled
from engine.errors import InputError
from engine.problem import Problem, make_problem
from engine.training import balanced_load, usual_step
from engine.workload import ExpertLoad
from tests.cases.pages import enter, field, open_sample, press, run_the_job, said, tick, visit
from tests.cases.sessions import open_recording
from tests.costs.silicon import needs_tables

pytestmark = pytest.mark.usefixtures("warm_python")


def empty(app: AppTest, cluster: str = "lancet-p4de-2-nodes", model: str = "GPT2-S-MoE") -> AppTest:
    """A session with cluster and model, but no recording."""
    app.session_state["cluster"] = cluster_presets()[cluster].cluster
    app.session_state["model"] = model_presets()[model].model
    return visit(app, "optimise")


def test_a_balanced_step_needs_no_recording(app: AppTest) -> None:
    empty(app)
    assert "needs no workload" in said(app.info)
    press(app, "Training step")
    assert not app.info or "press Run" in said(app.info)
    assert app.session_state["step"] == usual_step(app.session_state["model"], 16)
    summary = next(markdown.value for markdown in app.markdown if "operators" in markdown.value)
    # 24 × 512 tokens of 768 numbers of two bytes
    assert "12,288 tokens on each GPU" in summary and "18.9 MB in each GPU's buffer" in summary
    assert field(app, "Routing").options == ["balanced (assumed)"]
    for page in ("timeline", "affinity", "launch", "cluster", "workload"):
        visit(app, page)


def test_from_the_goal_to_the_timeline(app: AppTest) -> None:
    press(empty(app), "Training step")
    assert {box.label.split("**")[1] for box in app.checkbox if box.value and "**" in box.label} == {
        *("Lancet", "PipeMoE", "Lina (training)", "Tutel (best of 1, 2, 4, 8)", "DeepSpeed (no overlap)"),
        "RAF-like (no partition)",
    }
    assert not any(control.label == "Show" for control in app.segmented_control)
    run_the_job(tick(app, "Lancet", "DeepSpeed"))
    table = app.dataframe[0].value
    # The baseline is on top, then the fastest first.
    assert table["Plan"].tolist() == ["DeepSpeed (no overlap)", "Lancet"]
    times = table["Time, ms (simulated)"].astype(float)
    assert times[1] < times[0] and table["Against DeepSpeed"].tolist()[0] == "deployed"
    assert table["Above the bound"].str.endswith(" %").all() and "Above any placement's bound" not in table
    assert table["Exposed communication, ms"].str.contains(" · ").all()

    visit(app, "timeline")
    assert not app.error
    metrics = {metric.label: metric.value for metric in app.metric}
    assert metrics["Simulated step"] == f"{times[1]:.3g} ms"
    assert metrics["Exposed communication"].startswith(table["Exposed communication, ms"][1].split(" ")[0])
    assert metrics.keys() >= {"Bound for this placement", "Overlap", "GPU utilisation"}
    assert "every expert is chosen equally often" in said(app.caption)
    for part in ("forward", "backward"):
        enter(app, "Part of the step", part)
        assert any(slider.label == "Model layers" for slider in app.slider)


def test_changing_the_goal_loses_neither_plans_nor_the_step_and_closes_what_is_of_another(sample: AppTest) -> None:
    press(visit(sample, "optimise"), "Training step")
    enter(sample, "Batch per GPU, sequences", 7)
    run_the_job(tick(sample, "DeepSpeed"))
    enter(sample, "Batch per GPU, sequences", 8)
    row = sample.dataframe[0].value.iloc[0]
    assert row["Proof"] in ("schedule", "nothing") and row["Above the bound"].endswith(" %")
    enter(sample, "Batch per GPU, sequences", 7)
    press(sample, "Inference latency of one model")
    assert sample.session_state["step"] is None and not sample.dataframe
    run_the_job(tick(sample, "Linear"))
    assert sample.dataframe[0].value["Plan"].tolist() == ["Linear placement"]
    press(sample, "Training step")
    assert sample.session_state["step"].batch == 7
    assert sample.dataframe[0].value["Plan"].tolist() == ["DeepSpeed (no overlap)"]
    visit(sample, "timeline")
    assert "is for inference, but what is open is a training step; change the goal" in said(sample.info)
    press(visit(sample, "optimise"), "Two models on one cluster")
    assert sample.session_state["step"] is None
    assert "Choose the recording of the second model" in said(sample.info)
    sample.session_state["second"] = sample.session_state["workload"]
    press(sample.run(), "Training step")
    assert sample.session_state["second"] is None and sample.session_state["step"] is not None


def test_every_field_reaches_the_step_and_what_cannot_be_is_answered(sample: AppTest) -> None:
    press(visit(sample, "optimise"), "Training step")
    enter(sample, "Capacity factor", 0.5)
    assert "capacity_factor below 1 drops tokens" in said(sample.error) and "last valid step stays" in said(sample.error)
    assert sample.session_state["step"].capacity_factor == 1
    enter(sample, "Capacity factor", 1.25)
    assert not sample.error
    labels = ("Sequence length, tokens", "Attention heads", "Dense d_ff", "Vocabulary, tokens", "Gate", "Tied embeddings")
    chosen = {"sequence_length": 64, "heads": 4, "dense_d_ff": 99, "vocabulary": 1000, "gate": "random"}
    chosen |= {"tied_embeddings": False, "routing": "recorded"}
    for label, value in zip((*labels, "Routing"), chosen.values(), strict=True):
        field(sample, label).set_value(value)
    sample.run()
    assert sample.session_state["step"].model_dump(exclude={"batch"}) == chosen | {"capacity_factor": 1.25}
    assert "experts are chosen as in alpha-code" in said(sample.caption)
    recording = open_recording(sample, ExpertLoad("other", np.ones((3, 4)), (0, 1, 2)), alone=True)
    visit(sample, "timeline")
    assert sample.session_state["workload"] == recording and "does not fit the recording other" in said(sample.error)
    press(sample, "Assume balanced routing")
    assert not sample.error and sample.session_state["step"].routing == "balanced"
    visit(sample, "optimise")
    press(sample, "Defaults for tiny\\-moe\\-alpha")
    assert sample.session_state["step"] == usual_step(sample.session_state["model"], 8)
    assert field(sample, "Dense d_ff").value == sample.session_state["step"].dense_d_ff


def problem() -> Problem:
    model, cluster = model_presets()["GPT2-S-MoE"].model, cluster_presets()["lancet-p4de-2-nodes"].cluster
    return make_problem(balanced_load(model), cluster, model, Datasheet(), step=usual_step(model, 16))


def test_times_measured_anew_under_the_old_name_are_other_times() -> None:
    def key(seconds: float) -> tuple[str, ...]:
        gemm = GemmTimes(gpu="A100-80", dtype="fp16", points=((1.0, 1.0, 1.0, seconds),))
        return cached.key_of(replace(problem(), cost=Profiled(MeasuredTimes(name="mine", origin="here", gemm=(gemm,)))))

    assert key(1.0) == key(1.0) != key(2.0)


HALF = {"name": "a", "kind": "gradient"}
BAD_GRAPHS = {
    "not valid JSON": b"{",
    "operators": b'{"name": "x"}',
    "belong together": json.dumps({"name": "x", "operators": [HALF | {"phase": "dx", "layer": 0}]}).encode(),
    "needs no operator": json.dumps({"name": "x", "operators": [HALF | {"phase": "all_reduce", "layer": 0}]}).encode(),
}


@pytest.mark.parametrize("reason", BAD_GRAPHS)
def test_a_wrong_graph_is_answered_in_one_line_and_one_that_was_saved_is_read(reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        step_form._read_graph("graph.json", BAD_GRAPHS[reason], problem())
    assert "\n" not in str(caught.value) and str(caught.value).startswith("graph.json")
    graph = operators_of(problem())
    text = graph.model_dump_json(indent=1, exclude_none=True).encode()
    assert step_form._read_graph("operators.json", text, problem()) == graph


def test_a_graph_that_the_costs_cannot_time_is_refused() -> None:
    points = ((1.0, 1e-4), (2.0, 2e-4))
    times = CollectiveTimes(operation="all_to_all", ranks=16, points=points)
    cost = Combined(Datasheet(), Profiled(MeasuredTimes(name="tiny", origin="a test", collectives=(times,))))
    text = operators_of(problem()).model_dump_json(exclude_none=True).encode()
    with pytest.raises(InputError, match="tiny: all-to-all over 16 GPUs"):
        step_form._read_graph("operators.json", text, replace(problem(), cost=cost))


def test_an_imported_graph_counts_and_can_be_removed_and_another_model_has_a_step_of_its_own(app: AppTest) -> None:
    press(empty(app), "Training step")
    usual = {"kind": "qkv", "layer": 0, "seconds": 0.5}
    operators = [usual | {"name": "a", "phase": "forward"}, usual | {"name": "b", "phase": "dw"}]
    small = json.dumps({"name": "<b>mine</b>", "operators": operators}).encode()
    app.session_state["graph"] = store.save_document(step_form._read_graph("mine.json", small, problem()))
    app.run()
    assert "**2 operators**" in said(app.markdown) and "was imported" in said(app.markdown)
    press(app, "Remove the imported graph")
    assert "**371 operators**" in said(app.markdown)

    enter(app, "Batch per GPU, sequences", 5)
    for name, batch in (("GPT2-L-MoE", None), ("GPT2-S-MoE", 5)):
        app.session_state["model"] = model_presets()[name].model
        visit(app, "timeline")
        usual = usual_step(model_presets()[name].model, 16)
        assert app.session_state["step"] == (usual.model_copy(update={"batch": batch}) if batch else usual)


@needs_tables
def test_computation_and_network_are_chosen_apart_and_named(app: AppTest) -> None:
    empty(app)
    visit(app, "cluster")
    enter(app, "Computation", measuring.SILICON)
    assert not app.error and "computation: silicon" in said(app.caption) and "network: datasheet" in said(app.caption)
    enter(app, "Network", measuring.SILICON)
    assert "stop at one node" in said(app.error) and "measured tables, network by datasheet" in said(app.error)
    assert app.session_state["cost"]["network"] == {"source": "datasheet"}
    press(visit(app, "optimise"), "Training step")
    assert "Costs: computation: silicon" in said(app.caption) and "costs: measured tables" in said(app.caption)


@needs_tables
def test_costs_that_no_longer_fit_offer_the_datasheet_on_every_page(app: AppTest) -> None:
    empty(app)
    app.session_state["cost"] = {"source": "silicon"}
    press(app, "Training step")
    for page in ("optimise", "timeline"):  # a launch measures its own
        visit(app, page)
        assert "cannot time what is open: the NCCL tables stop at one node" in said(app.error)
    visit(app, "cluster")
    assert "The costs in use cannot time this cluster" in said(app.error)
    press(app, "Use the datasheet costs")
    assert not app.error and app.session_state["cost"] == {"source": "datasheet"}


def test_a_measured_file_can_be_chosen_and_what_it_lacks_is_said(app: AppTest) -> None:
    visit(open_sample(app), "cluster")
    collectives = [{"operation": "all_to_all", "ranks": 8, "points": [[1e3, 1e-4], [1e9, 1e-1]]}]
    measured = {"kind": "measured times", "name": "Datasheet", "origin": "a test", "collectives": collectives}
    app.session_state["sources"] = {"Datasheet": {"source": "measured", "measured": measured}}
    app.run()
    enter(app, "Computation", "Datasheet (file)")
    assert "it has no GEMM times at all" in said(app.error)
    enter(app, "Computation", measuring.DATASHEET)
    enter(app, "Network", "Datasheet (file)")
    assert not app.error and app.session_state["cost"]["network"]["source"] == "measured"
    press(app, "lancet\\-p4de\\-2\\-nodes")
    assert "no all-to-all over 16 GPUs (it has 8)" in said(app.error)
