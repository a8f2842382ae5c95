"""The command line as a person and as a script use it: answers, exit codes, and one clear line for every bad input."""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from engine.cli import LOOK_THEMSELVES, main, parser, plan
from engine.cluster import Cluster
from engine.formats import read_plan
from engine.goal import Goal
from engine.systems import SYSTEMS
from tests.cases.cli import CLUSTER, INPUTS, MODEL, RECORDING, ROOT, SAMPLES, error_line
from tests.cases.files import nccl_test_log as printed
from tests.strategies import NEEDS_ROWS


def test_without_a_file_nothing_is_saved_and_progress_goes_to_standard_error_only(engine, tmp_path):
    assert "saved" not in engine.text("plan", *INPUTS, "--system", "linear")
    (inputs := tmp_path / "inputs").mkdir()
    code, out, errors = engine("plan", *of_traffic(inputs, SAMPLES / "traffic-8.csv"), "--system", "aurora", "--json")
    assert code == 0 and json.loads(out)["saved"] is None and not list(tmp_path.glob("*.json"))
    assert "placing layer 1 of 1" in errors and errors.endswith("\n") and "placing" not in out


WITH_OUTPUT = {
    "plan": (*INPUTS, "--system", "linear"),
    "graph": (*INPUTS[2:], "--training", "usual"),
    "simulate": ("none.json",),
    "export": ("none.json", "--to", "csv"),
    "convert": ("none.npz",),
    "inspect": ("none.npz", "--fix"),
    "synthetic": ("--model", "none.json"),
    "calibrate": (),
    "detect": (),
    "efficiency": ("--cluster", "none.json"),
    "catalogue": ("H100",),
}
"""Every command with -o, but for those with a folder, and options that are looked at later."""


@pytest.mark.parametrize("command", WITH_OUTPUT)
def test_an_output_that_cannot_be_written_is_found_before_the_work(engine, command, tmp_path):
    for output, reason in ((tmp_path / "none" / "out.json", "No such file or directory"), (tmp_path, "it is a folder")):
        code, out, errors = engine(command, *WITH_OUTPUT[command], "-o", output)
        assert (code, out) == (2, "") and error_line(errors).endswith(f"{output} cannot be written: {reason}")
        assert errors.count("\n") == 1, "no progress"


def test_every_command_with_an_output_is_tried():
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    files = {name for name, command in commands.choices.items() for action in command._actions if "-o" in action.option_strings}
    assert files == {*WITH_OUTPUT, *LOOK_THEMSELVES}


def test_a_pipe_is_written_to_and_stays_one(engine, tmp_path):
    """As a device does: `-o /dev/null` of an administrator must not put a file in its place."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as read:
        fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, 1 << 20)
        assert engine("plan", *INPUTS, "--system", "linear", "-o", pipe)[0] == 0
        assert json.loads(read.read())["name"] == "Linear placement" and pipe.is_fifo()
        assert engine("convert", RECORDING, "--to", "npz", "-o", pipe)[0] == 0
        assert read.read().startswith(b"PK") and pipe.is_fifo()


def test_a_recording_on_which_plans_would_be_wrong_is_said_to_be_so(engine, tmp_path):
    counts = np.arange(8 * 16).reshape(8, 16) + 500
    for ranks, said in ((4, False), (1, True)):
        (tmp_path / "loads.json").write_text(json.dumps({"expert_load": (counts * (np.arange(16) < 4 * ranks)).tolist()}))
        code, _, errors = engine("plan", "--workload", tmp_path / "loads.json", *INPUTS[2:], "--system", "linear")
        assert code == 0 and ("warning: loads: The same 12 of 16 experts (first: expert 4) have no tokens" in errors) is said


def test_a_claim_is_repeated_where_its_plan_was_made_and_unless_the_plan_belies_it(engine, tmp_path):
    saved = tmp_path / "aurora.json"
    engine.json("plan", *INPUTS, "--system", "aurora", "--set", "time_limit=0.1", "-o", saved)
    assert "its optimiser claims, which is not computed again here: no placement" in engine.text("simulate", saved)
    assert "no placement" not in engine.text("simulate", saved, "--workload", SAMPLES / "tiny-moe" / "alpha-man.npz")
    false = json.loads(saved.read_text())
    saved.write_text(json.dumps(false | {"claim": false["claim"] | {"bound": 1e9}}))  # above the plan's own time
    assert "no placement" not in engine.text("simulate", saved)


def test_inputs_that_are_not_in_the_data_folder_are_missed_by_name(engine, saved, tmp_path, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path / "elsewhere"))
    assert "the model of this plan" in engine.refused("simulate", saved)
    assert "recording" in engine.refused("simulate", saved, "--model", MODEL)
    assert "the cluster of this plan" in engine.refused("simulate", saved, "--model", MODEL, "--workload", RECORDING)
    assert engine("simulate", saved, *INPUTS)[0] == 0
    monkeypatch.setenv("SWITCHYARD_DATA", str(saved))
    assert "set SWITCHYARD_DATA" in engine.refused("plan", *INPUTS, "--system", "linear")


def test_a_cost_profile_is_used_and_named(engine, tmp_path):
    path, plan, line = tmp_path / "cost.json", tmp_path / "plan.json", {"alpha": 1e-5, "beta": 1e-12}
    times = {gpu.type: line for gpu in Cluster.from_json(CLUSTER.read_bytes(), "").gpus}
    profile = {"name": "bench", "origin": "test", "gemm": times, "memory": times}
    path.write_text(json.dumps(profile))
    engine.json("plan", *INPUTS, "--cost", path, "--system", "linear", "-o", plan)
    assert "bench" in engine.json("simulate", plan, "--cost", path)["cost_source"]
    path.write_text(json.dumps(profile | {"gemm": {"H100": line}}))
    assert "no times for" in engine.refused("simulate", plan, "--cost", path)
    path.write_text("{")
    assert "cost.json" in engine.refused("simulate", plan, "--cost", path)


def of_traffic(folder: Path, matrix: Path) -> list:
    model = json.loads(MODEL.read_text()) | {"layers": 1, "experts": 8}
    (folder / "model.json").write_text(json.dumps(model))
    return ["--workload", matrix, "--cluster", CLUSTER, "--model", folder / "model.json"]


def test_traffic_of_nothing_is_no_crash(engine, tmp_path):
    np.savetxt(tmp_path / "zeros.csv", np.zeros((8, 8)), delimiter=",", fmt="%d")
    inputs = of_traffic(tmp_path, tmp_path / "zeros.csv")
    path = tmp_path / "plan.json"
    assert "moves no bytes" in engine.text("inspect", tmp_path / "zeros.csv")
    rows = engine.json("plan", *inputs, "--system", "all", "-o", path)["plans"]
    assert not any(row["metrics"]["total"] for row in rows)
    # ExFlow needs tokens to follow, which a matrix does not have.
    fitting = {name for name, system in SYSTEMS.items() if Goal.INFERENCE in system.goals}
    assert {row["system"] for row in rows} == fitting - {"exflow"} - NEEDS_ROWS
    assert [row["speedup"] for row in engine.json("compare", path, path)["plans"]] == [1.0, 1.0]
    assert engine.text("compare", path, path) and engine.text("simulate", path)


# Refusals.


class Trap:
    """Would create a file if it were ever unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


PLAN = "plan --workload {recording} --cluster {cluster} --model {model} --system linear"
REFUSED = [
    ("inspect {at}/hole.csv", ["hole.csv", "line 2"]),
    ("inspect {at}/trap.npy", ["trap.npy"]),
    (PLAN + " --model {samples}/tiny-moe-beta.json", ["tiny-moe-beta", "alpha-code", "2 experts per token"]),
    (PLAN + " --cluster {at}/broken.json", ["broken.json", "line 2"]),
    (PLAN + " --workload {at}/nowhere.npz", ["nowhere.npz", "no such file"]),
    (PLAN + " --cluster {at}/nowhere.json", ["nowhere.json", "no such file"]),
    ("simulate {at}/nowhere.json", ["nowhere.json", "no such file"]),
    ("simulate {model}", ["tiny-moe-alpha.json"]),
    (PLAN + " --workload {recording}::prose", ["alpha-code.npz", "prose"]),
    ("inspect {recording}::", ["FILE::NAME"]),
    (PLAN + " --set time_limit", ["time_limit", "KEY=VALUE"]),
    (PLAN + " --system all --set speed=3", ["all has no option 'speed'", "placement", "slots"]),
    (PLAN + " --set two\nlines", ["two lines"]),
    (PLAN + " -o {at}/no/such/folder/plan.json", ["plan.json", "cannot be written"]),
    (PLAN + " -o {at}", ["cannot be written"]),
]
"""Commands, and the parts of their refusals."""


def words_of(command: str, folder: Path) -> list[str]:
    (folder / "hole.csv").write_text("0,1,2\n3,0,\n5,6,0\n")
    (folder / "broken.json").write_text('{"name": "x",\n "nodes": [}')
    (folder / "data").mkdir()
    np.save(folder / "trap.npy", np.array([Trap(folder / "sprung")], dtype=object), allow_pickle=True)
    places = {"recording": RECORDING, "cluster": CLUSTER, "model": MODEL, "samples": SAMPLES, "at": folder}
    return command.format(**places).split(" ")


@pytest.mark.parametrize(("command", "parts"), REFUSED)
def test_bad_input_is_answered_with_one_line(engine, tmp_path, command, parts):
    words = words_of(command, tmp_path)
    before = set(tmp_path.iterdir())
    line = engine.refused(*words)
    assert all(part in line for part in parts), line
    assert set(tmp_path.iterdir()) == before, "a pickle was executed, or a draft left behind"


def test_bad_input_to_a_real_process(tmp_path, warm_python):
    command = [sys.executable, "-m", "engine", *words_of("inspect {at}/trap.npy", tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "") and "trap.npy" in error_line(run.stderr)


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
    for arguments in ([], ["dance"], ["plan"], ["simulate"], ["solve", "dance"], ["plan", *INPUTS, "--system", "dance"]):
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        assert caught.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err


# On real routing of a published model.


def test_efficiency_is_fitted_to_nccl_tests_and_kept_by_the_cluster(engine, tmp_path):
    sizes = [2**power for power in range(12, 24, 2)]
    log = tmp_path / "bench.log"
    log.write_text(
        printed("sendrecv_perf", gpus=8, rows=[(size, 20 + size / 50e3) for size in sizes])
        + printed("alltoall_perf", gpus=8, rows=[(size, 20 + 2 * size * 7 / 8 / 50e3) for size in sizes])
    )
    fitted = tmp_path / "fitted.json"
    answer = engine.json("efficiency", "--cluster", CLUSTER, "--measured", log, "--relative", "-o", fitted)
    (one, alone), (seven, crowded) = answer["efficiency"]["fabric"]
    assert (one, seven) == (1, 7) and alone == 1 and crowded == pytest.approx(0.5, rel=0.01)
    assert answer["start_up"] == pytest.approx(20e-6, rel=0.05) and answer["error"] < 0.01
    cluster = Cluster.from_json(fitted.read_text(), "fitted")
    assert cluster.model_copy(update={"efficiency": None}) == Cluster.from_json(CLUSTER.read_text(), "drawn")
    said = engine.text("efficiency", "--cluster", fitted)
    assert "100 % of their rate with 1 send, 50 % with 7" in said and "bench.log" in said
    assert "nothing to fit" in engine.refused("efficiency", "--cluster", CLUSTER, "-o", tmp_path / "x.json")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"name": "x", "origin": "y", "network": {"alpha": 1e-5, "beta": 1e-9}}))
    assert "how many sends met" in engine.refused("efficiency", "--cluster", CLUSTER, "--measured", profile)


# In processes of their own: signals, and readers that go away.


def python_m_engine(*arguments: object, **more: object) -> subprocess.Popen:
    """A process with text in pipes. more: of `subprocess.Popen`"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "engine", *map(str, arguments)], cwd=ROOT, **pipes, **more)


def test_a_reader_that_has_seen_enough_is_no_error(warm_python):
    process = python_m_engine("inspect", *[RECORDING] * 40)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("number", "python"), [(signal.SIGINT, "cold_python"), (signal.SIGTERM, "warm_python")], ids=["Ctrl-C", "SIGTERM"]
)
@pytest.mark.clock
def test_planning_that_is_broken_off_still_answers(tmp_path, request, number, python):
    request.getfixturevalue(python)
    experts = np.random.default_rng(1).integers(0, 32, (1500, 20, 2)).astype(np.int16)
    np.savez(tmp_path / "log.npz", experts=experts)
    model = json.loads(MODEL.read_text()) | {"layers": 20, "experts": 32, "experts_per_token": 2}
    (tmp_path / "model.json").write_text(json.dumps(model))
    inputs = ["--workload", tmp_path / "log.npz", "--cluster", CLUSTER, "--model", tmp_path / "model.json"]
    path = tmp_path / "plan.json"
    asked = ["--system", "aurora", "--set", "time_limit=600", "-o", path, "--json"]
    process = python_m_engine("plan", *inputs, *asked, bufsize=0)
    seen = ""
    while "placing layer 2" not in seen:
        seen += process.stderr.read(1)
        assert len(seen) < 10_000 and process.poll() is None, seen
    process.send_signal(number)
    begin = time.monotonic()
    out, _ = process.communicate(timeout=20)
    assert time.monotonic() - begin < 3
    (row,) = json.loads(out)["plans"]
    assert process.returncode == 0 and row["status"] == "CANCELLED" and read_plan(path).id == row["id"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_while_a_plan_is_saved_does_not_lose_it(tmp_path, monkeypatch, number):
    write = plan.write

    def interrupted(path: Path, text: str) -> None:
        signal.raise_signal(number)
        write(path, text)

    monkeypatch.setattr(plan, "write", interrupted)
    path = tmp_path / "plan.json"
    assert main(["plan", *map(str, INPUTS), "--system", "linear", "-o", str(path)]) == 0
    assert read_plan(path).provenance.optimiser == "linear"
