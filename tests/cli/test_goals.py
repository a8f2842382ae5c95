"""The command line with a training step, with tokens that travel row by row, and with figures of balance."""

import json

import numpy as np
import pytest

from engine.catalogue import cluster_presets, model_presets
from engine.compare.imbalance import PRESETS
from engine.formats import read_plan, read_workload
from engine.plan import Travel
from engine.systems import TRAINING
from engine.training import TrainingStep
from tests.cases.cli import CLUSTER, RECORDING, ROOT, SAMPLES

pytestmark = pytest.mark.usefixtures("warm_python")

STEP = {"batch": 4, "sequence_length": 32, "heads": 2, "dense_d_ff": 512, "vocabulary": 100}


@pytest.fixture
def inputs(tmp_path) -> list:
    """A tiny model on the mixed cluster, and a step."""
    (tmp_path / "step.json").write_text(json.dumps(STEP))
    return ["--cluster", CLUSTER, "--model", SAMPLES / "tiny-moe-alpha.json", "--training", tmp_path / "step.json"]


def test_all_systems_for_a_step_are_ranked_and_the_best_is_kept(engine, inputs, tmp_path):
    path = tmp_path / "plan.json"
    rows = engine.json("plan", *inputs, "--system", "all", "-o", path)["plans"]
    assert {row["system"] for row in rows} == set(TRAINING)
    assert read_plan(path).id == rows[0]["id"]
    assert engine.json("simulate", path)["metrics"] == rows[0]["metrics"]
    assert "leave out --tokens" in engine.refused("launch", path, "--tokens", "5")
    text = engine.text("plan", *inputs, "--system", "tutel")
    assert "exposed comm." in text and "overload:" not in text, "a table of training steps has no such column"


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
    path, recording = tmp_path / "plan.json", RECORDING
    (tmp_path / "step.json").write_text(json.dumps(STEP | {"capacity_factor": 0, "routing": "recorded"}))
    recorded = engine.json("plan", *inputs, "--workload", recording, "--system", "deepspeed", "-o", path)["plans"][0]
    assert recorded["metrics"]["balancedness"] < 0.9
    assert engine.json("simulate", path)["metrics"] == recorded["metrics"]
    (tmp_path / "step.json").write_text(json.dumps(STEP))
    balanced = engine.json("plan", *inputs, "--workload", recording, "--system", "deepspeed")["plans"][0]
    assert balanced["metrics"]["balancedness"] == pytest.approx(1)


def test_a_wrong_step_is_refused_in_one_line(engine, inputs, tmp_path):
    for name, value, reason in (
        ("batch", 0, "batch"),
        ("gate", "best", "gate"),
        ("capacity_factor", 0.5, "drops tokens"),
        ("speed", 1, "speed"),
    ):
        (tmp_path / "step.json").write_text(json.dumps(STEP | {name: value}))
        assert reason in engine.refused("plan", *inputs, "--system", "lancet")


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
    missing = ["--training", "no.json", "--system", "lancet"]
    assert "there is no such file" in engine.refused("plan", *inputs[:4], *missing)


@pytest.mark.everything
def test_a_training_plan_is_launched_with_the_step_that_it_was_made_for(engine, inputs, tmp_path):
    """Two ranks; tests/launch/test_step.py launches such plans without the command line."""
    path = tmp_path / "plan.json"
    engine.json("plan", *inputs, "--system", "deepspeed", "-o", path)
    answer = engine.json("launch", path, "--ranks", "2", "--repeats", "1")
    (run,) = answer["runs"]
    assert run["difference"] <= 1e-4 and {"dx", "dw", "all_reduce"} <= set(run["by_kind"]["kind"])


def test_every_field_of_a_step_is_in_its_json():
    assert TrainingStep.from_json(TrainingStep(**STEP).to_json(), "step") == TrainingStep(**STEP)


@pytest.fixture
def row_inputs(tmp_path) -> list:
    """Two layers of the sample with two experts per token."""
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


def test_copies_of_experts_serve_whom_they_save_rows(engine, row_inputs, tmp_path):
    path, system = tmp_path / "plan.json", ["--system", "coactivation", "--set", "time_limit=1", "--set", "redundant=1"]
    engine.json("plan", *row_inputs, *system, "--travel", "gpu:::fewest", "-o", path)
    assert read_plan(path).travel == Travel(unit="gpu", replicas="fewest")
    fewest, in_turn = engine.json("simulate", path), engine.json("simulate", path, "--travel", "gpu")
    assert "each token to the copies that touch fewest GPUs" in fewest["cost_source"]
    assert fewest["metrics"]["rows"] < in_turn["metrics"]["rows"]


def test_plain_travel_leaves_plans_as_they_were(engine, row_inputs, tmp_path):
    for name, more in (("old", []), ("new", ["--travel", "copies"])):
        engine.json("plan", *row_inputs, "--system", "linear", *more, "-o", tmp_path / f"{name}.json")
    old, new = (read_plan(tmp_path / f"{name}.json") for name in ("old", "new"))
    assert old.id == new.id and old.travel is new.travel is None


@pytest.mark.parametrize(
    ("travel", "parts"),
    [
        ("rail", ["--travel rail", "unit", "'copies', 'gpu' or 'node'"]),
        ("node:int4", ["--travel node:int4", "dispatch"]),
        ("node:fp8:bf16:fp8", ["--travel node:fp8:bf16:fp8", "replicas", "'fewest'"]),
        ("node:fp8:bf16:fewest:2", ["write UNIT, UNIT:OUT, UNIT:OUT:BACK or UNIT:OUT:BACK:fewest"]),
        ("copies:::fewest", ["--travel copies:::fewest: replicas: ", "use gpu or node"]),
    ],
)
def test_wrong_travel_is_one_line(engine, row_inputs, travel, parts):
    line = engine.refused("plan", *row_inputs, "--system", "linear", "--travel", travel)
    assert all(part in line for part in parts), line


def test_an_order_made_for_other_rows_is_not_bent(engine, row_inputs, tmp_path):
    path = tmp_path / "plan.json"
    engine.json("plan", *row_inputs, "--system", "rcs", "-o", path)
    line = engine.refused("simulate", path, "--travel", "gpu")
    assert "orders its sends for tokens that travel otherwise" in line


MODEL = SAMPLES / "tiny-moe-beta.json"


def factors_of(load: np.ndarray) -> dict[str, float]:
    """The figures of loads float64[layer, gpu], by NumPy alone."""
    factors = load.max(axis=1) / load.mean(axis=1)
    over = np.percentile(factors, [50, 75, 90, 95])
    return dict(zip(["mean", "p50", "p75", "p90", "p95", "max"], [factors.mean(), *over, factors.max()], strict=True))


def counted() -> np.ndarray:
    """int64[layer, expert] tokens of the recording."""
    return np.stack([np.bincount(layer, minlength=16) for layer in np.load(RECORDING)["experts"][:, :, 0].T])


def test_overload_factors_of_a_plan(engine, saved):
    # Tokens of every expert times the share that each GPU serves.
    load = np.einsum("le,leg->lg", counted(), read_plan(saved).placement.share)
    expected = factors_of(load)
    metrics = engine.json("simulate", saved)["metrics"]
    balance = metrics["balance"]
    assert balance["overload_factor"] == pytest.approx(expected)
    assert balance["imbalance_ratio"] == pytest.approx({name: factor - 1 for name, factor in expected.items()})
    assert balance["overload_factor_of_layer"] == pytest.approx(load.max(axis=1) / load.mean(axis=1))
    assert metrics["balancedness"] == pytest.approx((load.mean(axis=1) / load.max(axis=1)).mean())
    (compared,) = engine.json("compare", saved)["plans"]
    assert compared["metrics"]["balance"] == balance


def test_skew_over_layers(engine):
    recording = engine.json("inspect", RECORDING)
    assert recording["skew"] == pytest.approx(factors_of(counted()))
    said = "2.02× on average over layers; p50 1.94×, p75 2.13×, p90 2.32×, p95 2.43×, worst 2.55×"
    assert said in engine.text("inspect", RECORDING)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_become_recordings(engine, tmp_path, preset):
    path = tmp_path / f"{preset}.npz"
    answer = engine.json("synthetic", "--model", MODEL, "--preset", preset, "--tokens", 1024, "-o", path)
    assert answer["saved"] == str(path)
    assert answer["recording"]["name"].startswith(f"synthetic {PRESETS[preset].name}, 1,024 tokens")
    trace = read_workload(path, num_experts=16)
    assert (trace.tokens, trace.layers, trace.num_experts, trace.k) == (1024, 8, 16, 2)
    assert engine.json("inspect", path)["skew"] == answer["recording"]["skew"]


def test_skew_and_affinity_become_a_recording(engine, tmp_path):
    path = tmp_path / "made.npz"
    asked = ["--model", MODEL, "--skew", 1.2, "--affinity", 0.9, "--tokens", 4096, "--seed", 7]
    text = engine.text("synthetic", *asked, "-o", path)
    assert text.startswith("synthetic, skew 1.2, affinity 0.9, 4,096 tokens, seed 7: routing log")
    assert text.endswith(f"saved the recording: {path}\n")
    usual = engine.json("synthetic", "--model", MODEL, "-o", path)["recording"]
    assert usual["name"] == "synthetic, skew 1, affinity 0.5, 16,384 tokens"


def test_a_rotating_hotspot_is_seen_from_step_to_step_alone(engine, tmp_path):
    path, skew = tmp_path / "made.npz", []
    for steps in (3, 12):
        asked = ["--preset", "w6", "--steps", steps, "--tokens", 6144]
        skew.append(engine.json("synthetic", "--model", MODEL, *asked, "-o", path)["recording"]["skew"]["mean"])
    assert skew[0] > 3 and skew[1] < 1.2


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (["--preset", "w1", "--skew", "1"], ["--skew"]),
        (["--preset", "w1", "--affinity", "0"], ["--affinity"]),
        (["--steps", "3"], ["--steps", "--preset"]),
        (["--preset", "w6", "--steps", "0"], ["steps 0"]),
        (["--preset", "w1", "--tokens", "0"], ["tokens 0"]),
        (["--skew", "-1"], ["skew -1"]),
        (["--skew", "nan"], ["skew nan"]),
        (["-o", "made.csv"], ["made.csv", ".npz"]),
        (["-o", "nowhere/made.npz"], ["nowhere", "No such file"]),
        (["--model", "nowhere.json"], ["nowhere.json", "no such file"]),
    ],
)
def test_recordings_that_cannot_be_made(engine, tmp_path, monkeypatch, asked, parts):
    monkeypatch.chdir(tmp_path)
    line = engine.refused("synthetic", "--model", ROOT / MODEL, "-o", "made.npz", *asked)
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []
