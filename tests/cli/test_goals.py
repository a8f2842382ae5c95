"""The command line for training steps, tokens that travel row by row, steps of serving, and recordings that it makes."""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import pytest

from engine.catalogue import cluster_presets
from engine.cli import judgement
from engine.errors import InputError
from engine.formats import read_cluster, read_model, read_plan
from engine.plan import Travel
from tests.cases.cli import CLUSTER, MODEL, RECORDING, SAMPLES
from tests.costs.silicon import needs_tables

pytestmark = pytest.mark.usefixtures("warm_python")

STEP = {"batch": 4, "sequence_length": 32, "heads": 2, "dense_d_ff": 512, "vocabulary": 100}


@pytest.fixture
def inputs(tmp_path) -> list:
    (tmp_path / "step.json").write_text(json.dumps(STEP))
    return ["--cluster", CLUSTER, "--model", MODEL, "--training", tmp_path / "step.json"]


def test_operators_are_saved_edited_and_planned_with(engine, inputs, tmp_path):
    path = tmp_path / "graph.json"
    answer = engine.json("graph", *inputs, "-o", path)
    graph = json.loads(path.read_text())
    assert len(graph["operators"]) == answer["operators"]
    plain = engine.json("plan", *inputs, "--system", "deepspeed")["plans"][0]["metrics"]["total"]
    for operator in graph["operators"]:
        if operator["kind"] in ("dispatch", "combine"):
            operator["seconds"] = 0.05  # measured, and slow
    path.write_text(json.dumps(graph))
    plan = tmp_path / "plan.json"
    slow = engine.json("plan", *inputs, "--graph", path, "--system", "deepspeed", "-o", plan)["plans"][0]
    assert slow["metrics"]["total"] > plain + 30 * 0.05
    again = engine.json("simulate", plan)
    assert again["metrics"] == slow["metrics"] and "measured" in again["cost_source"]
    assert [row["speedup"] for row in engine.json("compare", plan, plan)["plans"]] == [1, 1]
    assert "leave out --tokens" in engine.refused("launch", plan, "--tokens", "5")


def test_a_recorded_routing_needs_its_recording_and_remembers_it(engine, inputs, tmp_path):
    path = tmp_path / "plan.json"
    (tmp_path / "step.json").write_text(json.dumps(STEP | {"capacity_factor": 0, "routing": "recorded"}))
    (recorded,) = engine.json("plan", *inputs, "--workload", RECORDING, "--system", "deepspeed", "-o", path)["plans"]
    assert recorded["metrics"]["balancedness"] < 0.9
    assert engine.json("simulate", path)["metrics"] == recorded["metrics"]


def test_what_does_not_go_together_is_refused(engine, inputs, tmp_path):
    assert "does not plan a training step" in engine.refused("plan", *inputs, "--system", "aurora")
    sample = ["--workload", RECORDING, *inputs[:4]]
    assert "does not plan inference" in engine.refused("plan", *sample, "--system", "lancet")
    assert "--workload is missing" in engine.refused("plan", *inputs[:4], "--system", "aurora")
    assert "one model" in engine.refused("plan", *inputs, *("--workload-b", sample[1]), "--system", "lancet")
    graph = tmp_path / "graph.json"
    graph.write_text('{"name": "x", "operators": [], "dependencies": []}')
    assert "graph.json" in engine.refused("plan", *inputs, "--graph", graph, "--system", "lancet")
    assert "no training step" in engine.refused("graph", *sample)
    assert "leave --travel out" in engine.refused("plan", *inputs, "--system", "lancet", "--travel", "copies:::fixed")
    for name, value, reason in (("batch", 0, "batch"), ("capacity_factor", 0.5, "drops tokens"), ("speed", 1, "speed")):
        (tmp_path / "step.json").write_text(json.dumps(STEP | {name: value}))
        assert reason in engine.refused("plan", *inputs, "--system", "lancet")


@pytest.mark.everything
def test_a_training_plan_is_launched_with_the_step_that_it_was_made_for(engine, inputs, tmp_path):
    """Two ranks; tests/launch/test_step.py launches such plans without the command line."""
    path = tmp_path / "plan.json"
    engine.json("plan", *inputs, "--system", "deepspeed", "-o", path)
    answer = engine.json("launch", path, "--ranks", "2", "--repeats", "1")
    (run,) = answer["runs"]
    assert run["difference"] <= 1e-4 and {"dx", "dw", "all_reduce"} <= set(run["by_kind"]["kind"])


@pytest.fixture
def row_inputs(tmp_path) -> list:
    with np.load(SAMPLES / "tiny-moe" / "beta-code.npz") as recorded:
        np.savez(tmp_path / "beta.npz", experts=recorded["experts"][::16, :2], sequence=recorded["sequence"][::16])
    model = json.loads((SAMPLES / "tiny-moe-beta.json").read_text()) | {"layers": 2}
    (tmp_path / "beta.json").write_text(json.dumps(model))
    return ["--workload", tmp_path / "beta.npz", "--cluster", CLUSTER, "--model", tmp_path / "beta.json"]


def test_a_plan_keeps_how_its_tokens_travel(engine, row_inputs, tmp_path):
    path = tmp_path / "plan.json"
    engine.json("plan", *row_inputs, "--system", "linear", "--travel", "node:fp8:bf16", "-o", path)
    assert read_plan(path).travel == Travel(unit="node", dispatch="fp8", combine="bf16")
    simulated = engine.json("simulate", path)
    assert "one row per node, fp8 out, bf16 back" in simulated["cost_source"]
    copies = engine.json("simulate", path, "--travel", "copies")
    assert copies["metrics"]["total"] > simulated["metrics"]["total"] and copies["id"] != simulated["id"]
    assert "row" not in copies["cost_source"]
    engine.json("plan", *row_inputs, "--system", "rcs", "--travel", "copies", "-o", path)
    assert read_plan(path).travel is None
    assert "orders its sends for tokens that travel otherwise" in engine.refused("simulate", path, "--travel", "gpu")


@pytest.mark.parametrize(
    ("travel", "said"),
    [
        ("rail", "--travel rail: unit: .*'copies', 'gpu' or 'node'"),
        ("node:int4", "--travel node:int4: dispatch"),
        ("node:fp8:bf16:fp8", "--travel node:fp8:bf16:fp8: replicas: .*'fewest'"),
        ("node:fp8:bf16:fewest:2", "write UNIT, UNIT:OUT, UNIT:OUT:BACK or UNIT:OUT:BACK:COPIES"),
        ("copies:::fewest", "--travel copies:::fewest: replicas: .*use gpu or node"),
    ],
)
def test_wrong_travel_is_one_line(engine, row_inputs, travel, said):
    line = engine.refused("plan", *row_inputs, "--system", "linear", "--travel", travel)
    assert re.search(said, line), line


def test_recordings_that_are_made_and_that_cannot_be(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for asked, said in (
        ("--preset w1 --skew 1", "--skew"),
        ("--preset w1 --affinity 0", "--affinity"),
        ("--steps 3", "--steps"),
        ("--preset w6 --steps 0", "steps 0"),
        ("--skew nan", "skew nan"),
        ("-o made.csv", ".npz"),
        ("-o nowhere/made.npz", "No such file"),
    ):
        assert said in engine.refused("synthetic", "--model", MODEL, "-o", "made.npz", *asked.split())
    assert list(tmp_path.iterdir()) == []
    text = engine.text("synthetic", "--model", MODEL, "-o", "made.npz")
    assert text.startswith("synthetic, skew 1, affinity 0.5, 16,384 tokens: routing log")
    assert text.endswith("saved the recording: made.npz\n")


# Serving, and the catalogue


@needs_tables
def test_what_cannot_be_served_is_said_in_one_line(engine, files):
    step, config = ["--serving", files["step"]], ["--config", files["config"]]
    unknown = "the sizes of tiny-moe-alpha beside its experts are not known; name its Hugging Face config.json"
    for more, message in (
        ([], unknown),
        (["--config", "deepseek-ai/DeepSeek-V3"], "has d_model 7168, the model tiny-moe-alpha 128"),
        ([*config, "--operators", "aiconfigurator"], "aiconfigurator has no tiny-moe-alpha on h200_sxm"),
    ):
        assert message in engine.refused("serve", files["linear"], *step, *more)
    typed = engine.refused("serve", files["linear"], "--serving", '{"phase": "prefil"}', *config)
    assert typed.startswith("error: the JSON given: phase: Input should be 'prefill' or 'decode'")
    step[1] = files["step"].read_text()
    assert engine.text("serve", files["linear"], *step, *config)  # as a file has it
    files["step"].write_text(json.dumps({"phase": "decode", "sequences": 31, "context": 1, "overlap": "two-batch"}))
    assert "31 sequences on a GPU are odd" in engine.refused("serve", files["linear"], "--serving", files["step"], *config)


@needs_tables
def test_a_model_of_the_catalogue_has_its_sizes_by_its_short_name_too():
    named = argparse.Namespace(config=None, model=Path("DeepSeek-R1"))
    assert read_model(judgement.config_of(named, read_model(named.model))).d_model == 7168


@needs_tables
def test_a_measured_model_is_taken_from_the_catalogue(engine, files, tmp_path):
    plan, log = tmp_path / "plan.json", tmp_path / "log.npy"
    np.save(log, (np.arange(64)[:, None, None] + 16 * np.arange(8)).repeat(48, axis=1) % 128)
    inputs = ["--workload", log, "--cluster", files["cluster"], "--model", "Qwen/Qwen3-30B-A3B"]
    engine.text("plan", *inputs, "--system", "linear", "-o", plan)
    answer = engine.json("serve", plan, "--serving", files["step"])
    (figures,) = answer["plans"]
    assert answer["notes"] == [] and "compiled engine for sglang on H200" in figures["operator_source"]
    assert "experts: fused kernels of SGLang (decode)" in figures["moe_source"]
    assert {operator["origin"] for operator in figures["operators"] if operator["kind"] == "attention"} == {"silicon"}


@needs_tables
def test_balanced_routing_needs_no_recording(engine, files, tmp_path):
    plan = tmp_path / "plan.json"
    inputs = ["--cluster", files["cluster"], "--model", "Qwen/Qwen3-30B-A3B"]
    engine.text("plan", "--workload", "balanced", *inputs, "--system", "linear", "-o", plan)
    (figures,) = engine.json("serve", plan, "--serving", files["step"])["plans"]
    assert figures["step_seconds"] == pytest.approx(figures["bound_seconds"], rel=0.01)
    assert engine.json("simulate", plan)["metrics"]["balancedness"] == pytest.approx(1)
    assert "balanced" in engine.refused("inspect", "balanced")


def test_a_name_of_the_catalogue_needs_no_file(tmp_path):
    assert read_cluster(Path("hgx-h100-4-nodes")) == cluster_presets()["hgx-h100-4-nodes"].cluster
    assert read_model(Path("DeepSeek-R1")).moe_layers == tuple(range(3, 61))
    for read, kind in ((read_cluster, "cluster"), (read_model, "model")):
        with pytest.raises(InputError, match=f"hgx-h100-5: there is no such file, and no {kind} of this name in the catalogue"):
            read(Path("hgx-h100-5"))
    (tmp_path / "DeepSeek-R1").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        read_model(tmp_path / "DeepSeek-R1")


@needs_tables
def test_nodes_of_a_gpu_become_a_cluster(engine, tmp_path):
    path = tmp_path / "cluster.json"
    assert engine.text("catalogue", "GB200", "--nodes", 3, "-o", path) == f"saved 12 GPUs in 3 nodes: {path}\n"
    cluster = read_cluster(path)
    assert len(cluster.gpus) == 12 and cluster.gpus[0].type == "GB200" and cluster.latency > 0
    assert "8 GPUs in 1 node:" in engine.text("catalogue", "H200", "-o", path)
    assert engine.json("catalogue", "H200", "--nodes", 2, "-o", path) == {"saved": str(path), "gpus": 16, "nodes": 2}
    for arguments, message in (
        (["H200"], "name the file that the cluster is to be written to"),
        (["H200", "--nodes", 0, "-o", path], "0 nodes: at least one is needed"),
        (["X1", "-o", path], "no GPU type 'X1' in the catalogue; it has MI355X, GB300, GB200"),
        (["-o", path], "-o writes nodes of one GPU type as a cluster; name the type"),
    ):
        assert message in engine.refused("catalogue", *arguments)
