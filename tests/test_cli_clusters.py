"""`launch --on slurm`, `--on kubernetes` and `collect`."""

import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from engine.catalogue import cluster_presets
from engine.cluster import Cluster
from tests.cases.cluster_launches import shared_folder
from tests.launch.cluster_fakes import JOB_NUMBER, install_slurm
from tests.test_cli import INPUTS, CommandLine


@pytest.fixture
def engine(capsys) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def shared(tmp_path) -> Path:
    return shared_folder(tmp_path)


@pytest.fixture
def plan(engine, tmp_path) -> Path:
    """A plan for the eight GPUs of the sample's cluster."""
    engine.json("plan", *INPUTS, "--system", "linear", "-o", tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_the_command_line_shows_what_would_be_submitted(engine, plan, shared):
    code, out, errors = engine(
        "launch", plan, "--on", "slurm", "--shared", shared, "--partition", "gpu", "--tokens", 64
    )
    assert code == 0 and out.startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n"], input=out, text=True, check=True)
    (folder,) = shared.iterdir()
    assert f"run folder: {folder}" in errors and errors.count("ok  ") == 11
    assert {path.name for path in folder.iterdir()} == {"spec.json", "trace.npz", "job.json"}
    assert np.load(folder / "trace.npz")["experts_0"].shape[0] == 64
    answer = engine.json(
        "launch",
        plan,
        "--on",
        "kubernetes",
        "--shared",
        shared,
        "--claim",
        "runs",
        "--image",
        "x/y:1",
        "--nodes",
        2,
        "--gpus-per-node",
        0,
        "--cpus-per-node",
        3,
        "--memory-per-node",
        20,
    )
    tasks = yaml.safe_load(answer["text"])["spec"]["tasks"]
    assert len(tasks) == 2 and answer["handle"] is None
    limits = tasks[0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "3000m", "memory": f"{20 * 2**30 // 10**6}M"}
    command = tasks[0]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--nproc-per-node") + 1] == "4" and answer["seen_as"] == command[-1]


def test_the_command_line_submits_and_collects(engine, plan, shared, tmp_path, monkeypatch):
    state = install_slurm(tmp_path, monkeypatch)
    text = engine.text("launch", plan, "--on", "slurm", "--shared", shared, "--submit")
    (folder,) = shared.iterdir()
    assert text.splitlines()[0] == f"submitted: slurm://switchyard/{JOB_NUMBER}" and shlex.split(text)[-2:] == [
        "collect",
        str(folder),
    ]
    assert (state / "script.sh").read_text().startswith("#!/bin/bash")
    (state / "queue").write_text("PENDING Resources")
    assert engine.json("status", folder) == {
        "handle": f"slurm://switchyard/{JOB_NUMBER}",
        "state": "pending",
        "message": "PENDING (Resources)",
        "over": False,
    }
    assert "has no report.json yet: slurm://switchyard/4242 is pending (Resources)" in engine.refused("collect", folder)
    assert engine.json("cancel", folder) == {"handle": f"slurm://switchyard/{JOB_NUMBER}"}
    assert engine.text("status", folder) == f"slurm://switchyard/{JOB_NUMBER} is cancelled\n"
    for command in ("status", "cancel"):
        assert "is not the run folder" in engine.refused(command, tmp_path)
    assert "is not the run folder" in engine.refused("collect", tmp_path)


REFUSED = [
    (["--on", "slurm"], "needs --shared"),
    (["--on", "kubernetes", "--shared", "S", "--image", "x"], "needs --claim"),
    (["--on", "kubernetes", "--shared", "S", "--claim", "x"], "needs --image"),
    (["--on", "kubernetes", "--shared", "S", "--partition", "x"], "--partition is not for --on kubernetes"),
    (["--on", "slurm", "--shared", "S", "--queue", "x"], "--queue is not for --on slurm"),
    (["--on", "slurm", "--shared", "S", "--partition", "a\n#SBATCH"], "partition"),
    (["--on", "slurm", "--shared", "S", "--ranks", "2"], "--ranks-per-node instead of --ranks"),
    (["--on", "slurm", "--shared", "S", "--scale", "2"], "--scale"),
    (["--on", "slurm", "--shared", "S", "--nodes", "9"], "choose between 1 and 8"),
    (["--on", "slurm", "--shared", "/nowhere/at/all"], "no run folder can be made"),
    (["--on", "slurm", "--shared", "S", "--gpus-per-node", "-1"], "gpus_per_node"),
    (["--on", "slurm", "--shared", "S", "--memory-per-node", "0"], "memory_per_node"),
    (["--on", "slurm", "--shared", "S", "--cluster", "UNEVEN"], "different numbers of GPUs"),
    (["--gpus-per-node", "0"], "--gpus-per-node is for a cluster"),
    (["--submit"], "--submit is for a cluster"),
]


def test_the_command_line_refuses_what_makes_no_sense(engine, plan, shared, tmp_path):
    node = cluster_presets()["mixed-8"].cluster.nodes[0]
    uneven = Cluster(name="uneven", nodes=(node, node.model_copy(update={"name": "twice", "gpus": node.gpus * 2})))
    (tmp_path / "uneven.json").write_text(uneven.to_json())
    places = {"S": shared, "UNEVEN": tmp_path / "uneven.json"}
    for options, word in REFUSED:
        code, out, errors = engine("launch", plan, *[places.get(option, option) for option in options])
        assert (code, out) == (2, "") and word in errors.splitlines()[-1]
        assert not list(shared.iterdir())
