"""The command line in processes of its own: signals, readers that go away, several commands one after another."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from engine.cli import main, plan
from engine.formats import read_plan
from tests.cases.cli import CLUSTER, INPUTS, MODEL, RECORDING, ROOT


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
