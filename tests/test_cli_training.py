"""The command line with a training step: planning, operators, what is remembered, and what is refused in one line."""

import json
from pathlib import Path

import pytest

from engine.catalogue import cluster_presets, model_presets
from engine.formats import read_plan
from engine.systems import TRAINING
from engine.training import TrainingStep
from tests.test_cli import CLUSTER, SAMPLES, CommandLine

pytestmark = [pytest.mark.usefixtures("warm_python"), pytest.mark.slow]

STEP = {"batch": 4, "sequence_length": 32, "heads": 2, "dense_d_ff": 512, "vocabulary": 100}


@pytest.fixture
def engine(capsys) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def inputs(tmp_path) -> list:
    """A tiny model on the mixed cluster, and a step."""
    (tmp_path / "step.json").write_text(json.dumps(STEP))
    return ["--cluster", CLUSTER, "--model", SAMPLES / "tiny-moe-alpha.json", "--training", tmp_path / "step.json"]


def test_all_systems_for_a_step_are_ranked_and_the_best_is_kept(engine, inputs, tmp_path):
    path = tmp_path / "plan.json"
    rows = engine.json("plan", *inputs, "--system", "all", "-o", path)["plans"]
    assert {row["system"] for row in rows} == set(TRAINING)
    totals = [row["metrics"]["total"] for row in rows]
    assert totals == sorted(totals) and all(row["metrics"]["bound"] <= row["metrics"]["total"] for row in rows)
    assert read_plan(path).id == rows[0]["id"]
    again = engine.json("simulate", path)
    assert again["metrics"] == rows[0]["metrics"] and "datasheet" in again["cost_source"]
    text = engine.text("simulate", path)
    assert "exposed communication" in text and "costs: datasheet" in text
    assert "exposed comm." in engine.text("plan", *inputs, "--system", "tutel")


def test_a_plan_is_compared_with_another_on_its_remembered_step(engine, inputs, tmp_path):
    for name in ("lancet", "deepspeed"):
        engine.json("plan", *inputs, "--system", name, "-o", tmp_path / f"{name}.json")
    first, second = engine.json("compare", tmp_path / "deepspeed.json", tmp_path / "lancet.json")["plans"]
    assert first["speedup"] == 1 and second["speedup"] > 1


def test_the_usual_step_needs_only_model_and_cluster(engine, tmp_path):
    model, cluster = tmp_path / "model.json", tmp_path / "cluster.json"
    model.write_text(model_presets()["GPT2-S-MoE"].model.to_json())
    cluster.write_text(cluster_presets()["lancet-p4de-2-nodes"].cluster.to_json())
    answer = engine.json("graph", "--model", model, "--cluster", cluster, "--training", "usual")
    assert "24 × 512" in answer["name"]  # 384 sequences on 16 GPUs, as Lancet has them on A100
    assert {row["phase"] for row in answer["rows"]} == {"forward", "dx", "dw", "all_reduce", "update"}


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


def test_a_recorded_routing_needs_its_recording_and_remembers_it(engine, inputs, tmp_path):
    path, recording = tmp_path / "plan.json", SAMPLES / "tiny-moe" / "alpha-code.npz"
    (tmp_path / "step.json").write_text(json.dumps(STEP | {"capacity_factor": 0, "routing": "recorded"}))
    recorded = engine.json("plan", *inputs, "--workload", recording, "--system", "deepspeed", "-o", path)["plans"][0]
    assert recorded["metrics"]["balancedness"] < 0.9
    assert engine.json("simulate", path)["metrics"] == recorded["metrics"]
    (tmp_path / "step.json").write_text(json.dumps(STEP))
    balanced = engine.json("plan", *inputs, "--workload", recording, "--system", "deepspeed")["plans"][0]
    assert balanced["metrics"]["balancedness"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"batch": 0}, "batch"),
        ({"gate": "best"}, "gate"),
        ({"capacity_factor": 0.5}, "drops tokens"),
        ({"speed": 1}, "speed"),
    ],
)
def test_a_wrong_step_is_refused_in_one_line(engine, inputs, tmp_path, step, reason):
    (tmp_path / "step.json").write_text(json.dumps(STEP | step))
    assert reason in engine.refused("plan", *inputs, "--system", "lancet")


def test_what_does_not_go_together_is_refused(engine, inputs, tmp_path):
    assert "does not plan a training step" in engine.refused("plan", *inputs, "--system", "aurora")
    sample = ["--workload", SAMPLES / "tiny-moe" / "alpha-code.npz", *inputs[:4]]
    assert "does not plan inference" in engine.refused("plan", *sample, "--system", "lancet")
    assert "--workload is missing" in engine.refused("plan", *inputs[:4], "--system", "aurora")
    assert "one model" in engine.refused("plan", *inputs, *("--workload-b", sample[1]), "--system", "lancet")
    graph = tmp_path / "graph.json"
    graph.write_text('{"name": "x", "operators": [], "dependencies": []}')
    assert "graph.json" in engine.refused("plan", *inputs, "--graph", graph, "--system", "lancet")
    assert "no training step" in engine.refused("graph", *sample)
    assert "there is no such file" in engine.refused(
        "plan", *inputs[:4], "--training", Path("no.json"), "--system", "lancet"
    )


def test_a_training_plan_is_launched_with_the_step_that_it_was_made_for(engine, inputs, tmp_path):
    path = tmp_path / "plan.json"
    engine.json("plan", *inputs, "--system", "deepspeed", "-o", path)
    assert "leave out --tokens" in engine.refused("launch", path, "--tokens", "5")
    answer = engine.json("launch", path, "--ranks", "2", "--repeats", "1")
    (run,) = answer["runs"]
    assert run["difference"] <= 1e-4 and {"dx", "dw", "all_reduce"} <= set(run["by_kind"]["kind"])


@pytest.mark.parametrize("option", [["--cost", "silicon"], ["--graph", "graph.json"]])
def test_a_launch_does_not_pretend_to_heed_what_it_ignores(engine, tmp_path, option):
    path, sample = tmp_path / "plan.json", ["--workload", SAMPLES / "tiny-moe" / "alpha-code.npz", "--cluster", CLUSTER]
    engine.json("plan", *sample, "--model", SAMPLES / "tiny-moe-alpha.json", "--system", "linear", "-o", path)
    assert "leave out --cost" in engine.refused("launch", path, *option)
    assert "is for inference" in engine.refused("launch", path, "--training", "usual")


def test_every_field_of_a_step_is_in_its_json():
    assert TrainingStep.from_json(TrainingStep(**STEP).to_json(), "step") == TrainingStep(**STEP)
