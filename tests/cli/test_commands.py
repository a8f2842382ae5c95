"""The command line as a person and as a script use it: answers, exit codes, and one clear line for every bad input."""

import csv
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.catalogue import cluster_presets, model_presets
from engine.cli import main
from engine.cluster import Cluster
from engine.formats import read_plan
from engine.goal import Goal
from engine.systems import SYSTEMS
from tests.cases.cli import CLUSTER, INPUTS, MODEL, RECORDING, ROOT, SAMPLES, error_line
from tests.cases.files import nccl_test_log as printed
from tests.strategies import NEEDS_ROWS

DEEPSEEK = ROOT.parent / "shared" / "data" / "deepseek-v2-lite-routing.npz"
QUICK = ["--set", "time_limit=0.1"]

# Answers.


def test_plan_writes_what_it_says(engine, tmp_path):
    path = tmp_path / "plan.json"
    answer = engine.json("plan", *INPUTS, "--system", "aurora", "--set", "time_limit=0.3", "-o", path)
    (row,) = answer["plans"]
    plan = read_plan(path)
    assert (answer["saved"], row["id"], row["name"], row["system"]) == (str(path), plan.id, "Aurora", "aurora")
    assert plan.provenance.options["time_limit"] == 0.3
    assert row["metrics"]["bound"] <= row["metrics"]["total"] == pytest.approx(plan.claim.objective)
    assert "plan" not in row


def test_all_systems_are_ranked_and_the_fastest_is_saved(engine, tmp_path):
    path = tmp_path / "best.json"
    rows = engine.json("plan", *INPUTS, "--system", "all", *QUICK, "--set", "seed=4", "-o", path)["plans"]
    fitting = {name for name, system in SYSTEMS.items() if Goal.INFERENCE in system.goals}
    assert sorted(row["system"] for row in rows) == sorted(fitting - NEEDS_ROWS)
    times = [row["metrics"]["total"] for row in rows]
    assert times == sorted(times) and read_plan(path).id == rows[0]["id"]


def test_without_a_file_nothing_is_saved_and_progress_goes_to_standard_error_only(engine, tmp_path):
    assert "saved" not in engine.text("plan", *INPUTS, "--system", "linear")
    (inputs := tmp_path / "inputs").mkdir()
    code, out, errors = engine("plan", *of_traffic(inputs, SAMPLES / "traffic-8.csv"), "--system", "aurora", "--json")
    assert code == 0 and json.loads(out)["saved"] is None and not list(tmp_path.glob("*.json"))
    assert "placing layer 1 of 1" in errors and errors.endswith("\n") and "placing" not in out


def test_simulate_and_compare_find_the_inputs_of_the_plan(engine, saved, tmp_path):
    timeline = tmp_path / "timeline.json"
    alone = engine.json("simulate", saved, "-o", timeline)
    assert alone == engine.json("simulate", saved, *INPUTS)
    assert alone["id"] == read_plan(saved).id and alone["events"] > 0
    assert len(json.loads(timeline.read_text())["events"]["start"]) == alone["events"]
    assert alone["metrics"]["total"] == pytest.approx(sum(alone["metrics"]["seconds"].values()))
    printed = tmp_path / "printed.json"
    engine.json("plan", *INPUTS, "--system", "aurora-printed", "-o", printed)
    first, second = engine.json("compare", saved, printed)["plans"]
    assert (first["file"], first["speedup"], first["moved_experts"]) == ("linear.json", 1.0, 0)
    assert first["metrics"] == alone["metrics"]
    assert second["speedup"] == pytest.approx(first["metrics"]["total"] / second["metrics"]["total"])
    assert second["moved_experts"] > 0 and second["order"] == "matched"
    assert "simulated" in engine.text("simulate", saved)
    assert "linear.json (Linear placement)" in engine.text("compare", saved, printed)


def test_a_plan_scores_differently_on_another_recording_and_claims_no_bound_there(engine, tmp_path):
    saved = tmp_path / "aurora.json"
    engine.json("plan", *INPUTS, "--system", "aurora", *QUICK, "-o", saved)
    own, other = (
        engine.json("simulate", saved, "--workload", SAMPLES / "tiny-moe" / f"{name}.npz")["metrics"]
        for name in ("alpha-code", "alpha-man")
    )
    assert own["total"] != other["total"]
    assert own["bound"] is not None and other["bound"] is None and other["gap"] is None
    assert "its optimiser claims, which is not computed again here: no placement" in engine.text("simulate", saved)
    foreign = engine.text("simulate", saved, "--workload", SAMPLES / "tiny-moe" / "alpha-man.npz")
    assert "no placement" not in foreign
    false = json.loads(saved.read_text())
    saved.write_text(json.dumps(false | {"claim": false["claim"] | {"bound": 1e9}}))  # above the plan's own time
    assert "no placement" not in engine.text("simulate", saved)


def test_inputs_that_are_not_in_the_data_folder_are_missed_by_name(engine, saved, tmp_path, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path / "elsewhere"))
    assert "MoEModel" in engine.refused("simulate", saved)
    assert "recording" in engine.refused("simulate", saved, "--model", MODEL)
    assert "Cluster" in engine.refused("simulate", saved, "--model", MODEL, "--workload", RECORDING)
    assert engine("simulate", saved, *INPUTS)[0] == 0


def test_a_cost_profile_is_used_and_named(engine, tmp_path):
    linear_cost = {"alpha": 1e-5, "beta": 1e-12}
    types = {gpu.type for gpu in Cluster.from_json(CLUSTER.read_bytes(), "").gpus}
    profile = {"name": "bench", "origin": "test"}
    profile |= {kind: dict.fromkeys(types, linear_cost) for kind in ("gemm", "memory")}
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(profile))
    plan = tmp_path / "plan.json"
    engine.json("plan", *INPUTS, "--cost", path, "--system", "linear", "-o", plan)
    assert "bench" in engine.json("simulate", plan, "--cost", path)["cost_source"]
    path.write_text(json.dumps(profile | {"gemm": {"H100": linear_cost}}))
    assert "no times for" in engine.refused("simulate", plan, "--cost", path)
    path.write_text("{")
    assert "cost.json" in engine.refused("simulate", plan, "--cost", path)


def of_traffic(folder: Path, matrix: Path) -> list:
    """The options for a matrix of traffic between eight GPUs."""
    model = json.loads(MODEL.read_text()) | {"layers": 1, "experts": 8}
    written(folder / "model.json", json.dumps(model))
    return ["--workload", matrix, "--cluster", CLUSTER, "--model", folder / "model.json"]


def test_traffic_is_planned_with_one_expert_a_gpu(engine, tmp_path):
    path = tmp_path / "plan.json"
    arguments = ["plan", *of_traffic(tmp_path, SAMPLES / "traffic-8.csv"), "--system", "all", "-o", path]
    rows = engine.json(*arguments)["plans"]
    # ExFlow needs tokens to follow, which a matrix does not have.
    fitting = {name for name, system in SYSTEMS.items() if Goal.INFERENCE in system.goals}
    assert {row["system"] for row in rows} == fitting - {"exflow"} - NEEDS_ROWS
    text = engine.text(*arguments)
    assert all(row["name"] in text for row in rows) and f"saved the fastest plan: {path}" in text


def test_traffic_of_nothing_is_no_crash(engine, tmp_path):
    np.savetxt(tmp_path / "zeros.csv", np.zeros((8, 8)), delimiter=",", fmt="%d")
    inputs = of_traffic(tmp_path, tmp_path / "zeros.csv")
    path = tmp_path / "plan.json"
    assert "moves no bytes" in engine.text("inspect", tmp_path / "zeros.csv")
    for row in engine.json("plan", *inputs, "--system", "all", "-o", path)["plans"]:
        assert row["metrics"]["total"] == 0
    assert [row["speedup"] for row in engine.json("compare", path, path)["plans"]] == [1.0, 1.0]
    assert engine.text("compare", path, path) and engine.text("simulate", path)


# Refusals.


def plan_with(**replaced: object) -> list[object]:
    inputs = {"workload": RECORDING, "cluster": CLUSTER, "model": MODEL} | replaced
    return ["plan", *(part for name, path in inputs.items() for part in (f"--{name}", path)), "--system", "linear"]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def traffic_file(path: Path, change) -> Path:
    rows = list(csv.reader((SAMPLES / "traffic-8.csv").read_text().splitlines()))
    change(rows)
    return written(path, "\n".join(map(",".join, rows)))


def changed_json(path: Path, original: Path, change) -> Path:
    document = json.loads(original.read_text())
    change(document)
    return written(path, json.dumps(document))


class Trap:
    """Would create a file if it were ever unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def expert_out_of_range(folder: Path):
    experts = np.load(RECORDING)["experts"].copy()
    experts[17, 3, 0] = 16
    np.savez(folder / "wild.npz", experts=experts)
    return plan_with(workload=folder / "wild.npz")


def pickle_in_npy(folder: Path):
    np.save(folder / "trap.npy", np.array([Trap(folder / "sprung")], dtype=object), allow_pickle=True)
    return ["inspect", folder / "trap.npy"]


def huge_file(folder: Path):
    os.truncate(written(folder / "huge.csv", ""), 300 * 1024**2)
    return ["inspect", folder / "huge.csv"]


def member_of_several(folder: Path):
    np.savez(folder / "two.npz", intent=np.zeros((4, 2, 1), int), summary=np.zeros((4, 2, 1), int))
    return ["inspect", f"{folder / 'two.npz'}::missing"]


def unwritable_data_folder(folder: Path):
    written(folder / "data", "")
    return plan_with()


REFUSED = {
    "hole": (
        lambda at: ["inspect", traffic_file(at / "hole.csv", lambda rows: rows[2].__setitem__(5, ""))],
        ["hole.csv", "3", "6"],
    ),
    "negative bytes": (
        lambda at: ["inspect", traffic_file(at / "negative.csv", lambda rows: rows[1].__setitem__(4, "-7"))],
        ["negative.csv", "-7"],
    ),
    "not square": (lambda at: ["inspect", traffic_file(at / "oblong.csv", lambda rows: rows.pop())], ["oblong.csv", "square"]),
    "expert out of range": (expert_out_of_range, ["wild.npz", "16", "token 17", "layer 3"]),
    "notes named npz": (lambda at: ["inspect", written(at / "notes.npz", "what a fine day")], ["notes.npz", "npz"]),
    "pickle in npy": (pickle_in_npy, ["trap.npy"]),
    "bare pickle": (lambda at: ["inspect", written(at / "bare.npy", pickle.dumps(Trap(at / "sprung")))], ["bare.npy"]),
    "empty file": (lambda at: ["inspect", written(at / "empty.csv", "")], ["empty.csv", "empty"]),
    "huge file": (huge_file, ["huge.csv", "300 MB", "200 MB"]),
    "model of another recording": (
        lambda at: plan_with(model=SAMPLES / "tiny-moe-beta.json"),
        ["tiny-moe-beta", "alpha-code", "2 experts per token", "1"],
    ),
    "model with fewer layers": (
        lambda at: plan_with(model=changed_json(at / "short.json", MODEL, lambda model: model.update(layers=6))),
        ["alpha-code", "6 MoE layers", "8"],
    ),
    "cluster without a field": (
        lambda at: plan_with(
            cluster=changed_json(at / "cluster.json", CLUSTER, lambda all: all["nodes"][1]["gpus"][0].pop("memory"))
        ),
        ["cluster.json", "nodes → 1 → gpus → 0 → memory"],
    ),
    "broken JSON": (
        lambda at: plan_with(cluster=written(at / "cluster.json", '{"name": "x",\n "nodes": [}')),
        ["cluster.json", "line 2"],
    ),
    "broken model": (lambda at: plan_with(model=written(at / "model.json", '["a list"]')), ["model.json", "object"]),
    "missing recording": (lambda at: plan_with(workload=at / "nowhere.npz"), ["nowhere.npz", "no such file"]),
    "missing cluster": (lambda at: plan_with(cluster=at / "nowhere.json"), ["nowhere.json", "no such file"]),
    "missing plan": (lambda at: ["simulate", at / "nowhere.json"], ["nowhere.json", "no such file"]),
    "missing member": (lambda at: plan_with(workload=f"{RECORDING}::prose"), ["alpha-code.npz", "prose"]),
    "member of several": (member_of_several, ["two.npz", "missing", "intent", "summary"]),
    "member without a name": (lambda at: ["inspect", f"{RECORDING}::"], ["FILE::NAME"]),
    "name with a line end": (lambda at: [*plan_with(), "--set", "two\nlines"], ["two lines"]),
    "unwritable plan": (
        lambda at: [*plan_with(), "-o", at / "no" / "such" / "folder" / "plan.json"],
        ["plan.json", "cannot be written"],
    ),
    "folder as plan": (lambda at: [*plan_with(), "-o", at], ["cannot be written"]),
    "unwritable data folder": (unwritable_data_folder, ["data", "SWITCHYARD_DATA"]),
}
"""Commands for files in a folder, which they make, and the parts of the refusals."""


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_answered_with_one_line(engine, tmp_path, case):
    make, parts = REFUSED[case]
    line = engine.refused(*make(tmp_path))
    for part in parts:
        assert part in line, line
    assert not (tmp_path / "sprung").exists(), "a pickle was executed"
    assert not (tmp_path / "plan.json").exists()
    assert not list(tmp_path.glob(".*")), "a draft was left behind"


@pytest.mark.parametrize("case", ["hole", "pickle in npy", "unwritable plan"])
def test_bad_input_to_a_real_process(tmp_path, case, warm_python):
    make, parts = REFUSED[case]
    command = [sys.executable, "-m", "engine", *map(str, make(tmp_path))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    line = error_line(run.stderr)
    assert all(part in line for part in parts) and not (tmp_path / "sprung").exists()


def test_a_plan_for_another_number_of_gpus(engine, saved, tmp_path):
    cluster = json.loads(CLUSTER.read_text())
    cluster["nodes"] = cluster["nodes"][:-1]
    (tmp_path / "smaller.json").write_text(json.dumps(cluster))
    gpus = sum(len(node["gpus"]) for node in cluster["nodes"])
    for command in ("simulate", "compare"):
        line = engine.refused(command, saved, "--cluster", tmp_path / "smaller.json")
        assert "8 GPUs" in line and str(gpus) in line


def test_a_plan_that_is_no_plan(engine, saved, tmp_path):
    plan = json.loads(saved.read_text())
    plan["placement"]["experts_of_gpu"][3][0] = []
    (tmp_path / "holey.json").write_text(json.dumps(plan))
    assert "layer 3: expert 0 is on no GPU" in engine.refused("simulate", tmp_path / "holey.json")
    assert "tiny-moe-alpha.json" in engine.refused("compare", saved, MODEL)


@pytest.mark.parametrize(
    ("system", "setting", "parts"),
    [
        ("aurora", "speed=3", ["aurora has no option 'speed'", "order", "slots", "time_limit"]),
        ("aurora-printed", "seed=1", ["aurora-printed has no option 'seed'", "none"]),
        ("all", "speed=3", ["all has no option 'speed'", "placement", "slots"]),
        ("aurora", "time_limit", ["time_limit", "KEY=VALUE"]),
        ("aurora", "=3", ["''"]),
        ("aurora", "time_limit=soon", ["time_limit", "'soon'", "number"]),
        ("aurora", "time_limit=-1", ["time_limit", "-1"]),
        ("aurora", "time_limit=nan", ["time_limit", "nan"]),
        ("aurora", "seed=1.5", ["seed", "whole number"]),
        ("aurora", "order=fastest", ["order", "fastest", "matched"]),
        ("aurora", "slots=", ["slots", "even"]),
    ],
)
def test_settings_are_checked(engine, system, setting, parts):
    line = engine.refused("plan", *INPUTS, "--system", system, "--set", setting)
    for part in parts:
        assert part in line, line


def test_a_setting_has_its_effect(engine, tmp_path):
    path = tmp_path / "plan.json"
    for order in ("matched", "concurrent"):
        engine.json("plan", *INPUTS, "--system", "eplb", *QUICK, "--set", f"order={order}", "-o", path)
        assert read_plan(path).send_order.mode == order


def test_a_launch_that_makes_no_sense_is_not_started(engine, saved):
    for option, values, part in (
        ("--ranks", (0, 9), "{} ranks"),
        ("--tokens", (0, -5), "token"),
        ("--repeats", (0, 101), "passes"),
        ("--limit", (0, "nan"), "limit"),
        ("--cost", ("silicon",), "leave out --cost"),
        ("--graph", ("graph.json",), "leave out --cost"),
        ("--training", ("usual",), "is for inference"),
    ):
        for value in values:
            assert part.format(value) in engine.refused("launch", saved, option, value)


def test_unknown_commands_and_missing_arguments_exit_with_2(capsys):
    for arguments in ([], ["dance"], ["plan"], ["simulate"], ["solve", "dance"], [*plan_with()[:-1], "dance"]):
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        assert caught.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err


# On real routing of a published model.


@pytest.mark.skipif(not DEEPSEEK.exists(), reason="the DeepSeek-V2-Lite recording is not beside this project")
def test_deepseek_v2_lite_on_eight_mixed_gpus(engine, tmp_path):
    (tmp_path / "model.json").write_text(model_presets()["DeepSeek-V2-Lite"].model.to_json())
    (tmp_path / "cluster.json").write_text(cluster_presets()["mixed-8"].cluster.to_json())
    inputs = ["--cluster", tmp_path / "cluster.json", "--model", tmp_path / "model.json"]
    plans = {}
    for system, more in (("aurora", ["--set", "time_limit=1"]), ("linear", [])):
        plans[system] = tmp_path / f"{system}.json"
        asked = ["--workload", f"{DEEPSEEK}::intent", *inputs, "--system", system, *more]
        engine.json("plan", *asked, "-o", plans[system])
    plan = read_plan(plans["aurora"])
    assert plan.placement.layers == 26 and plan.placement.slots.tolist() == [[8] * 8] * 26
    answer = engine.json("simulate", plans["aurora"])
    assert answer["metrics"]["bound"] <= answer["metrics"]["total"] == pytest.approx(plan.claim.objective)
    linear, aurora = engine.json("compare", plans["linear"], plans["aurora"])["plans"]
    assert aurora["metrics"] == answer["metrics"] and aurora["speedup"] > 1.1
    assert linear["metrics"]["order_bound"] >= aurora["metrics"]["bound"]
    elsewhere = engine.json("compare", *plans.values(), "--workload", f"{DEEPSEEK}::summary")["plans"]
    assert elsewhere[0]["metrics"]["total"] != aurora["metrics"]["total"]


def test_efficiency_is_fitted_to_nccl_tests_and_kept_by_the_cluster(engine, tmp_path):
    sizes = [2**power for power in range(12, 24, 2)]
    log = tmp_path / "bench.log"
    log.write_text(
        printed("sendrecv_perf", gpus=8, rows=[(size, 20 + size / 50e3) for size in sizes])
        + printed("alltoall_perf", gpus=8, rows=[(size, 20 + 2 * size * 7 / 8 / 50e3) for size in sizes])
    )
    assert "however many sends share them" in engine.text("efficiency", "--cluster", CLUSTER)
    fitted = tmp_path / "fitted.json"
    answer = engine.json("efficiency", "--cluster", CLUSTER, "--measured", log, "--relative", "-o", fitted)
    (one, alone), (seven, crowded) = answer["efficiency"]["fabric"]
    assert (one, seven) == (1, 7) and alone == 1 and crowded == pytest.approx(0.5, rel=0.01)
    assert answer["start_up"] == pytest.approx(20e-6, rel=0.05) and answer["error"] < 0.01
    cluster = Cluster.from_json(fitted.read_text(), "fitted")
    assert cluster.model_copy(update={"efficiency": None}) == Cluster.from_json(CLUSTER.read_text(), "drawn")
    said = engine.text("efficiency", "--cluster", fitted)
    assert "100 % of their rate with 1 send, 50 % with 7" in said and "bench.log" in said
    plan = tmp_path / "plan.json"
    inputs = ["--workload", RECORDING, "--cluster", fitted, "--model", MODEL]
    engine.text("plan", *inputs, "--system", "linear", "-o", plan)
    assert "50 % with 7" in engine.json("simulate", plan)["cost_source"]


def test_efficiency_without_measurements_fits_nothing(engine, tmp_path):
    assert "nothing to fit" in engine.refused("efficiency", "--cluster", CLUSTER, "-o", tmp_path / "x.json")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"name": "x", "origin": "y", "network": {"alpha": 1e-5, "beta": 1e-9}}))
    assert "how many sends met" in engine.refused("efficiency", "--cluster", CLUSTER, "--measured", profile)
