"""The goals of a training step and of serving, from their cards to the timeline, and the choice of costs, without a browser."""

import json
from dataclasses import replace

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import cached, model_catalogue
from app.charts import serving as charts
from app.charts import stacks
from app.charts.theme import PARTS
from app.cluster import measuring
from app.optimise import step as step_form
from app.tables import plain
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.compare.sensitivity import operators_of
from engine.costs import CollectiveTimes, Combined, Datasheet, GemmTimes, MeasuredTimes, Profiled
from engine.errors import InputError
from engine.formats import read_sizes
from engine.jobs import runner
from engine.plan import SendOrder
from engine.problem import Problem, make_problem
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import usual_serving, usual_sizes
from engine.serving.step import ServingStep
from engine.simulate.serving import serve
from engine.systems import SYSTEMS, run
from engine.systems.pieces import linear_placement
from engine.training import balanced_load, usual_step
from engine.units import digits, seconds, signed
from engine.workload import ExpertLoad
from tests.cases import pages
from tests.cases.cli import ALPHA
from tests.cases.sessions import open_recording
from tests.costs.silicon import needs_tables

pytestmark = pytest.mark.usefixtures("warm_python")


def empty(app: AppTest, cluster: str = "lancet-p4de-2-nodes", model: str = "GPT2-S-MoE") -> AppTest:
    """A session with cluster and model, but no recording."""
    app.session_state["cluster"] = cluster_presets()[cluster].cluster
    app.session_state["model"] = model_presets()[model].model
    return pages.visit(app, "optimise")


def test_a_balanced_step_needs_no_recording(app: AppTest) -> None:
    empty(app)
    assert "needs no workload" in pages.said(app.info)
    pages.press(app, "Training step")
    assert not app.info or "press Plan it" in pages.said(app.info)
    assert app.session_state["step"] == usual_step(app.session_state["model"], 16)
    summary = next(markdown.value for markdown in app.markdown if "operators" in markdown.value)
    # 24 × 512 tokens of 768 numbers of two bytes
    assert "12,288 tokens on each GPU" in summary and "18.9 MB in each GPU's buffer" in summary
    assert pages.field(app, "Routing").options == ["balanced (assumed)"]
    for page in ("timeline", "affinity", "launch", "cluster", "workload"):
        pages.visit(app, page)


def test_from_the_goal_to_the_timeline(app: AppTest) -> None:
    pages.press(empty(app), "Training step")
    assert {box.label.split("**")[1] for box in app.checkbox if box.value and "**" in box.label} == {
        *("Lancet", "PipeMoE", "Lina (training)", "Tutel (best of 1, 2, 4, 8)", "DeepSpeed (no overlap)"),
        *("RAF-like (no partition)", "Best of all (training)"),
    }
    assert not any(control.label == "Show" for control in app.segmented_control)
    pages.run_the_job(pages.tick(app, "Lancet", "DeepSpeed"))
    table = app.dataframe[0].value
    # The baseline is on top, then the fastest first.
    assert table["Plan"].tolist() == ["DeepSpeed (no overlap)", "Lancet"]
    times = table["Time, ms (simulated)"].astype(float)
    assert times[1] < times[0] and table["Gain over DeepSpeed"].tolist()[0] == "deployed"
    assert table["Above the bound"].str.endswith(" %").all() and "Above any placement's bound" not in table
    assert table["Exposed communication, ms"].str.contains(" · ").all()

    pages.visit(app, "timeline")
    assert not app.error
    metrics = {metric.label: metric.value for metric in app.metric}
    assert metrics["Simulated step"] == f"{times[1]:.3g} ms"
    assert metrics["Exposed communication"].startswith(table["Exposed communication, ms"][1].split(" ")[0])
    assert metrics.keys() >= {"Bound for this placement", "Overlap", "GPU utilisation"}
    assert "every expert is chosen equally often" in pages.said(app.caption)
    for part in ("forward", "backward"):
        pages.enter(app, "Part of the step", part)
        assert any(slider.label == "Model layers" for slider in app.slider)


def test_changing_the_goal_loses_neither_plans_nor_the_step_and_closes_what_is_of_another(sample: AppTest) -> None:
    pages.press(pages.visit(sample, "optimise"), "Training step")
    pages.enter(sample, "Batch per GPU, sequences", 7)
    pages.run_the_job(pages.tick(sample, "DeepSpeed"))
    pages.enter(sample, "Batch per GPU, sequences", 8)
    row = sample.dataframe[0].value.iloc[0]
    assert row["Proof"] in ("schedule", "nothing") and row["Above the bound"].endswith(" %")
    pages.enter(sample, "Batch per GPU, sequences", 7)
    pages.press(sample, "Inference latency of one model")
    assert sample.session_state["step"] is None and not sample.dataframe
    pages.run_the_job(pages.tick(sample, "Linear"))
    assert sample.dataframe[0].value["Plan"].tolist() == ["Linear placement"]
    pages.press(sample, "Training step")
    assert sample.session_state["step"].batch == 7
    assert sample.dataframe[0].value["Plan"].tolist() == ["DeepSpeed (no overlap)"]
    pages.visit(sample, "timeline")
    assert "is for inference, but what is open is a training step; change the goal" in pages.said(sample.info)
    pages.press(pages.visit(sample, "optimise"), "Two models on one cluster")
    assert sample.session_state["step"] is None
    assert "Choose the recording of the second model" in pages.said(sample.info)
    sample.session_state["second"] = sample.session_state["workload"]
    pages.press(sample.run(), "Training step")
    assert sample.session_state["second"] is None and sample.session_state["step"] is not None


def test_every_field_reaches_the_step_and_what_cannot_be_is_answered(sample: AppTest) -> None:
    pages.press(pages.visit(sample, "optimise"), "Training step")
    pages.enter(sample, "Capacity factor", 0.5)
    assert "capacity_factor below 1 drops tokens" in pages.said(sample.error) and "last valid step stays" in pages.said(
        sample.error
    )
    assert sample.session_state["step"].capacity_factor == 1
    pages.enter(sample, "Capacity factor", 1.25)
    assert not sample.error
    labels = ("Sequence length, tokens", "Attention heads", "Dense d_ff", "Vocabulary, tokens", "Gate", "Tied embeddings")
    chosen = {"sequence_length": 64, "heads": 4, "dense_d_ff": 99, "vocabulary": 1000, "gate": "random"}
    chosen |= {"tied_embeddings": False, "routing": "recorded"}
    for label, value in zip((*labels, "Routing"), chosen.values(), strict=True):
        pages.field(sample, label).set_value(value)
    sample.run()
    assert sample.session_state["step"].model_dump(exclude={"batch"}) == chosen | {"capacity_factor": 1.25}
    assert "experts are chosen as in alpha-code" in pages.said(sample.caption)
    recording = open_recording(sample, ExpertLoad("other", np.ones((3, 4)), (0, 1, 2)), alone=True)
    pages.visit(sample, "timeline")
    assert sample.session_state["workload"] == recording and "does not fit the recording other" in pages.said(sample.error)
    pages.press(sample, "Assume balanced routing")
    assert not sample.error and sample.session_state["step"].routing == "balanced"
    pages.visit(sample, "optimise")
    pages.press(sample, "Defaults for tiny\\-moe\\-alpha")
    assert sample.session_state["step"] == usual_step(sample.session_state["model"], 8)
    assert pages.field(sample, "Dense d_ff").value == sample.session_state["step"].dense_d_ff


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
def test_a_wrong_graph_is_answered_in_one_line(reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        step_form._read_graph("graph.json", BAD_GRAPHS[reason], problem())
    assert "\n" not in str(caught.value) and str(caught.value).startswith("graph.json")


def test_a_graph_that_the_costs_cannot_time_is_refused() -> None:
    points = ((1.0, 1e-4), (2.0, 2e-4))
    times = CollectiveTimes(operation="all_to_all", ranks=16, points=points)
    cost = Combined(Datasheet(), Profiled(MeasuredTimes(name="tiny", origin="a test", collectives=(times,))))
    graph = operators_of(problem())
    text = graph.model_dump_json(indent=1, exclude_none=True).encode()
    assert step_form._read_graph("operators.json", text, problem()) == graph, "as it was saved"
    with pytest.raises(InputError, match="tiny: all-to-all over 16 GPUs"):
        step_form._read_graph("operators.json", text, replace(problem(), cost=cost))


def test_an_imported_graph_counts_and_can_be_removed_and_another_model_has_a_step_of_its_own(app: AppTest) -> None:
    pages.press(empty(app), "Training step")
    usual = {"kind": "qkv", "layer": 0, "seconds": 0.5}
    operators = [usual | {"name": "a", "phase": "forward"}, usual | {"name": "b", "phase": "dw"}]
    small = json.dumps({"name": "<b>mine</b>", "operators": operators}).encode()
    pages.put(app, graph=store.save_document(step_form._read_graph("mine.json", small, problem())))
    assert "**2 operators**" in pages.said(app.markdown) and "was imported" in pages.said(app.markdown)
    pages.press(app, "Remove the imported graph")
    assert "**371 operators**" in pages.said(app.markdown)

    pages.enter(app, "Batch per GPU, sequences", 5)
    for name, batch in (("GPT2-L-MoE", None), ("GPT2-S-MoE", 5)):
        app.session_state["model"] = model_presets()[name].model
        pages.visit(app, "timeline")
        usual = usual_step(model_presets()[name].model, 16)
        assert app.session_state["step"] == (usual.model_copy(update={"batch": batch}) if batch else usual)


@needs_tables
def test_computation_and_network_are_chosen_apart_and_named(app: AppTest) -> None:
    empty(app)
    pages.visit(app, "cluster")
    pages.enter(app, "Computation", measuring.SILICON)
    assert (
        not app.error and "computation: silicon" in pages.said(app.caption) and "network: datasheet" in pages.said(app.caption)
    )
    pages.enter(app, "Network", measuring.SILICON)
    assert "stop at one node" in pages.said(app.error) and "measured tables, network by datasheet" in pages.said(app.error)
    assert app.session_state["cost"]["network"] == {"source": "datasheet"}
    pages.press(pages.visit(app, "optimise"), "Training step")
    assert "Costs: measured tables, network by " in pages.said(app.caption) and "costs: measured tables" in pages.said(
        app.caption
    )


@needs_tables
def test_costs_that_no_longer_fit_offer_the_datasheet_on_every_page(app: AppTest) -> None:
    empty(app)
    app.session_state["cost"] = {"source": "silicon"}
    pages.press(app, "Training step")
    for page in ("optimise", "timeline"):  # a launch measures its own
        pages.visit(app, page)
        assert "cannot time what is open: the NCCL tables stop at one node" in pages.said(app.error)
    pages.visit(app, "cluster")
    assert "The costs in use cannot time this cluster" in pages.said(app.error)
    pages.press(app, "Use the datasheet costs")
    assert not app.error and app.session_state["cost"] == {"source": "datasheet"}


def test_a_measured_file_can_be_chosen_and_what_it_lacks_is_said(app: AppTest) -> None:
    pages.visit(pages.open_sample(app), "cluster")
    collectives = [{"operation": "all_to_all", "ranks": 8, "points": [[1e3, 1e-4], [1e9, 1e-1]]}]
    measured = {"kind": "measured times", "name": "Datasheet", "origin": "a test", "collectives": collectives}
    pages.put(app, sources={"Datasheet": {"source": "measured", "measured": measured}})
    pages.enter(app, "Computation", "Datasheet (file)")
    assert "it has no GEMM times at all" in pages.said(app.error)
    pages.enter(app, "Computation", measuring.DATASHEET)
    pages.enter(app, "Network", "Datasheet (file)")
    assert not app.error and app.session_state["cost"]["network"]["source"] == "measured"
    pages.press(app, "lancet\\-p4de\\-2\\-nodes")
    assert "no all-to-all over 16 GPUs (it has 8)" in pages.said(app.error)


SERVE = "Serving step"


def serving(app: AppTest, preset: str = "hgx-h200-8") -> AppTest:
    """The page with the goal chosen and GPUs of one type."""
    app.session_state["cluster"] = cluster_presets()[preset].cluster
    return pages.press(pages.visit(app, "optimise"), SERVE)


def serving_unmeasured(app: AppTest) -> None:
    """The page with the goal chosen and GPUs whose operators nobody measured: those of others take a second to load."""
    cluster = cluster_presets()["lancet-p3dn-2-nodes"].cluster
    app.session_state["cluster"] = cluster.model_copy(update={"nodes": cluster.nodes[:1]})
    pages.press(pages.visit(app, "optimise"), SERVE)


def test_a_mixed_cluster_is_served_with_sequences_by_speed(sample: AppTest) -> None:
    pages.press(pages.visit(sample, "optimise"), SERVE)
    assert len({gpu.type for gpu in sample.session_state["cluster"].gpus}) > 1 and not sample.error
    assert sample.session_state["serving"] == usual_serving()
    said = [f"on each {kind}" for kind in dict.fromkeys(gpu.type for gpu in sample.session_state["cluster"].gpus)]
    assert all(each in pages.said(sample.caption) for each in ("by their speed", *said))
    assert pages.metrics(sample).keys() >= {"Simulated time per token", "Tokens/s per GPU", "Left to gain by order"}
    assert pages.gain(sample) == {"Deployed now": "0.0 %"}


def test_the_figures_of_the_table_are_those_of_serve(sample: AppTest) -> None:
    pages.run_the_job(pages.tick(pages.visit(serving(sample), "optimise"), "Aurora**", "Linear", "Random order"))
    table = sample.dataframe[0].value
    assert table["Plan"].tolist() == ["Linear placement", "Aurora", "Random order (RCS)"]
    model, cluster = sample.session_state["model"], sample.session_state["cluster"]
    problem = make_problem(store.load_workload(sample.session_state["workload"]), cluster, model, Datasheet())
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
        gained = signed(deployed.seconds / figures.seconds - 1)
        assert row["Gain over Linear placement, in sample"] == ("deployed" if row["Plan"] == "Linear placement" else gained)
        assert row["Room for sequences"] == f"{figures.memory.most_sequences(step):,}"
    times = table[time].astype(float).tolist()
    assert times[1:] == sorted(times[1:]) and times[-1] > times[0] >= times[1]
    assert pages.gain(sample) == {"Gain over Linear placement, in sample": signed(deployed.seconds / best.seconds - 1)}

    pages.put(sample, in_use=plans["Random order (RCS)"].id)
    table = sample.dataframe[0].value
    assert table["Plan"].iloc[0] == "Random order (RCS)" and table[""].iloc[0] == ""
    assert table["Gain over Random order (RCS), in sample"].iloc[0] == "deployed"
    assert pages.gain(sample)["Gain over Random order (RCS), in sample"].startswith("+")
    pages.visit(sample, "timeline")
    assert pages.metrics(sample)["Simulated time per token"] == seconds(best.seconds)
    (metric,) = [each for each in sample.metric if each.label == "Simulated time per token"]
    deployed, even = plans["Random order (RCS)"], problem.with_workload(balanced_load(model))
    ceiling = serve(deployed, even, step, source, sizes).figures.seconds
    assert plain(f"With balanced routing a step takes {seconds(ceiling)}: today's skew costs") in metric.proto.help
    assert "MoE layers" in pages.said(sample.caption) and not sample.error
    assert "here the plan's MoE layers alone count" in pages.said(pages.visit(sample, "launch").caption)
    assert "The whole step is simulated" in pages.said(pages.visit(sample, "what_if").caption)
    pages.press(pages.visit(sample, "optimise"), "Inference latency of one model")
    assert "Aurora" in set(sample.dataframe[0].value["Plan"]) and "Simulated time per token" not in pages.metrics(sample)
    pages.press(sample, SERVE)
    assert len(sample.dataframe[0].value) == 3


def test_a_plan_that_cannot_be_served_is_not_opened_by_itself(sample: AppTest) -> None:
    pages.tick(serving(sample), "ExFlow", "Linear")
    pages.field(sample, "Time limit (s)").set_value(0.1)
    pages.run_the_job(sample)
    assert sample.dataframe[0].value["Plan"].tolist() == ["Linear placement"]
    assert "ExFlow is not in the table: the plan ExFlow is executed context-coherently" in pages.said(sample.caption)
    assert sample.dataframe[0].value[""].tolist() == ["▸"]


def test_what_cannot_be_is_said_the_last_step_stays_and_every_model_has_its_own(sample: AppTest) -> None:
    serving_unmeasured(sample)
    pages.enter(sample, "Overlap", "two-batch")
    assert sample.session_state["serving"].overlap == "two-batch"
    pages.enter(sample, "Sequences per GPU", 31)
    assert "31 sequences on a GPU are odd" in pages.said(sample.error) and "The last valid step stays" in pages.said(
        sample.error
    )
    assert sample.session_state["serving"].sequences == 64
    pages.enter(sample, "Sequences per GPU", 32)
    assert not sample.error and sample.session_state["serving"].sequences == 32
    pages.enter(sample, "Sequences per GPU", 100_000)
    assert "It does not fit" in pages.said(sample.warning) and "At most" in pages.said(sample.warning)
    pages.enter(sample, "Sequences per GPU", 16)
    alpha = sample.session_state["model"]
    for model, sequences in ((model_presets()["Qwen3-30B-A3B"].model, 64), (alpha, 16)):
        pages.put(sample, model=model)
        assert sample.session_state["serving"].sequences == sequences
    pages.enter(sample, "Step", "prefill")
    assert sample.session_state["serving"].phase == "prefill" and "Simulated time to first token" in pages.metrics(sample)
    assert sample.session_state["serving"].sequences == usual_serving("prefill").sequences
    assert not any(box.label == "Output, tokens" for box in sample.number_input)


def test_an_uploaded_config_tells_the_sizes_and_may_be_of_another_model(sample: AppTest) -> None:
    serving_unmeasured(sample)
    assert "beside its experts are assumed" in pages.said(sample.info)
    assumed = pages.metrics(sample)["Simulated time per token"]
    pages.visit(sample, "workload")
    config = json.dumps(ALPHA).encode()
    assert not pages.upload(sample, "recordings", {"alpha.json": config}).error, pages.said(sample.error)
    pages.visit(sample, "optimise")
    assert not sample.info or "assumed" not in pages.said(sample.info)
    assert pages.metrics(sample)["Simulated time per token"] != assumed
    assert "sizes: the uploaded config.json" in pages.said(sample.caption)
    digest = next(iter(sample.session_state["configs"].values()))
    path = store.config_path(digest)
    assert path.read_bytes() == config and read_sizes(path).vocabulary == 1000
    path.unlink()
    sample.run()
    assert "no longer in the data folder; upload it again" in pages.said(sample.error)
    pages.visit(sample, "workload")
    pages.upload(sample, "recordings", {"other.json": json.dumps(ALPHA | {"num_experts": 32, "_name_or_path": "other"})})
    assert not sample.error and sample.session_state["model"].experts == 32
    pages.visit(sample, "optimise")
    assert "Balanced routing is assumed" in pages.said(sample.caption) and "Simulated time per token" in pages.metrics(sample)


@needs_tables
def test_a_model_of_the_catalogue_needs_no_recording(sample: AppTest) -> None:
    pages.enter(serving(sample), "Catalogue of models", "Qwen/Qwen3-30B-A3B")
    assert sample.session_state["configs"][sample.session_state["model"].digest] == "Qwen/Qwen3-30B-A3B"
    assert "assumed: no recording of this model is open" in pages.said(sample.caption)
    assert "compiled engine for sglang on H200" in pages.said(sample.caption)
    assert any("fused kernels of SGLang" in (caption.help or "") for caption in sample.caption) and not sample.error
    pages.enter(sample, "Catalogue of models", "Qwen/Qwen3.5-35B-A3B")
    assert "layers of gated DeltaNet" in pages.said(sample.caption) and sample.metric and not sample.error
    pages.enter(sample, "Catalogue of models", "deepseek-ai/DeepSeek-V4-Flash")
    assert "compress_ratios: may change attention" in pages.said(sample.error) and not sample.metric


def test_without_the_package_the_catalogue_says_so(sample: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_catalogue, "package_folder", lambda: None)
    pages.visit(sample, "workload")
    assert "package aiconfigurator-core" in pages.said(sample.caption)
    assert not any(box.label == "Catalogue of models" for box in sample.selectbox)


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
        assert set(figures.parts) <= PARTS.keys()
        factor = 1e-3 if "ms" in figure.layout.xaxis.title.text else 1.0
        assert sum(bar.x[0] for bar in bars) * factor == pytest.approx(figures.seconds + figures.hidden)
        assert "<b>" not in figure.layout.title.text and "takes as long as linear" in figure.layout.title.text
        assert max(len(trace.name) for trace in figure.data if trace.showlegend is not False) <= stacks.ENTRY
        above, other = (note.text for note in figure.layout.annotations)
        assert above.startswith(f"&lt;b&gt;plan&lt;/b&gt;: {seconds(figures.seconds)}") and other.startswith("linear: ")
        assert ("hidden" in above) == (overlap != "none") and above.endswith(f"bound {seconds(figures.bound)}")


def test_the_lengths_in_a_recordings_name_are_the_default_and_are_said(sample: AppTest) -> None:
    digest, model = sample.session_state["workload"], sample.session_state["model"]
    pages.put(sample, workloads={digest: "decode_in1500out100"})
    serving_unmeasured(sample)
    step = sample.session_state["serving"]
    assert (step.phase, step.context, step.output) == ("decode", 1500, 100)
    said = "Decode, 1,500 tokens in, 100 out: by the name of decode_in1500out100"
    assert said in pages.said(sample.caption)
    pages.enter(sample, "Output, tokens", 300)
    assert said not in pages.said(sample.caption) and sample.session_state["serving"].output == 300
    pages.press(sample, "By the name of decode\\_in1500out100: decode, 1,500 tokens in, 100 out")
    assert sample.session_state["serving"] == step and pages.field(sample, "Output, tokens").value == 100
    pages.put(sample, workloads={digest: "prefill_in1024"})
    pages.press(sample, "By the name of prefill\\_in1024: prefill, 1,024 tokens in")
    step = sample.session_state["serving"]
    assert (step.phase, step.context, step.sequences) == ("prefill", 1024, usual_serving("prefill").sequences)
    assert sample.session_state["servings"][model.digest] == step
