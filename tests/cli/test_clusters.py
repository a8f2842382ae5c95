"""`detect`, `launch --on slurm`, `launch --on kubernetes` and `collect`."""

import shlex
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from engine.catalogue import cluster_presets, gpu_types
from engine.cluster import Cluster
from engine.formats import read_cluster
from tests.cases.cli import CommandLine
from tests.cases.cluster_launches import shared_folder
from tests.cases.files import everywhere, pair_log, printed
from tests.launch.cluster_fakes import JOB_NUMBER, install_slurm
from tests.launch.nvml import GIB, Gpu, plug_in, switched


@pytest.fixture
def shared(tmp_path) -> Path:
    return shared_folder(tmp_path)


def test_the_command_line_shows_what_would_be_submitted(engine, saved, shared):
    code, out, errors = engine("launch", saved, "--on", "slurm", "--shared", shared, "--partition", "gpu", "--tokens", 64)
    assert code == 0 and out.startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n"], input=out, text=True, check=True)
    (folder,) = shared.iterdir()
    assert f"run folder: {folder}" in errors and errors.count("ok  ") == 11
    assert {path.name for path in folder.iterdir()} == {"spec.json", "trace.npz", "job.json"}
    assert np.load(folder / "trace.npz")["experts_0"].shape[0] == 64
    answer = engine.json(
        *("launch", saved, "--on", "kubernetes", "--shared", shared, "--claim", "runs", "--image", "x/y:1"),
        *("--nodes", 2, "--gpus-per-node", 0, "--cpus-per-node", 3, "--memory-per-node", 20),
    )
    tasks = yaml.safe_load(answer["text"])["spec"]["tasks"]
    assert len(tasks) == 2 and answer["handle"] is None
    limits = tasks[0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "3000m", "memory": f"{20 * 2**30 // 10**6}M"}
    command = tasks[0]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--nproc-per-node") + 1] == "4" and answer["seen_as"] == command[-1]


def test_the_command_line_submits_and_collects(engine, saved, shared, tmp_path, monkeypatch):
    state = install_slurm(tmp_path, monkeypatch)
    text = engine.text("launch", saved, "--on", "slurm", "--shared", shared, "--submit")
    (folder,) = shared.iterdir()
    assert text.splitlines()[0] == f"submitted: slurm://switchyard/{JOB_NUMBER}"
    assert shlex.split(text)[-2:] == ["collect", str(folder)]
    assert (state / "script.sh").read_text().startswith("#!/bin/bash")
    (state / "queue").write_text("PENDING Resources")
    stands = {"state": "pending", "message": "PENDING (Resources)", "over": False}
    assert engine.json("status", folder) == {"handle": f"slurm://switchyard/{JOB_NUMBER}"} | stands
    assert "has no report.json yet: slurm://switchyard/4242 is pending (Resources)" in engine.refused("collect", folder)
    assert engine.json("cancel", folder) == {"handle": f"slurm://switchyard/{JOB_NUMBER}"}
    assert engine.text("status", folder) == f"slurm://switchyard/{JOB_NUMBER} is cancelled\n"
    for command in ("status", "cancel", "collect"):
        assert "is not the run folder" in engine.refused(command, tmp_path)


SLURM = "--on slurm --shared {shared} "
REFUSED = [
    ("--on slurm", "needs --shared"),
    ("--on kubernetes --shared {shared} --image x", "needs --claim"),
    ("--on kubernetes --shared {shared} --claim x", "needs --image"),
    ("--on kubernetes --shared {shared} --partition x", "--partition is not for --on kubernetes"),
    (SLURM + "--queue x", "--queue is not for --on slurm"),
    (SLURM + "--partition a\n#SBATCH", "partition"),
    (SLURM + "--ranks 2", "--ranks-per-node instead of --ranks"),
    (SLURM + "--scale 2", "--scale"),
    (SLURM + "--nodes 9", "choose between 1 and 8"),
    ("--on slurm --shared /nowhere/at/all", "no run folder can be made"),
    (SLURM + "--gpus-per-node -1", "gpus_per_node"),
    (SLURM + "--memory-per-node 0", "memory_per_node"),
    (SLURM + "--cluster {uneven}", "different numbers of GPUs"),
    ("--gpus-per-node 0", "--gpus-per-node is for a cluster"),
    ("--submit", "--submit is for a cluster"),
]


def test_the_command_line_refuses_what_makes_no_sense(engine, saved, shared, tmp_path):
    node = cluster_presets()["mixed-8"].cluster.nodes[0]
    uneven = Cluster(name="uneven", nodes=(node, node.model_copy(update={"name": "twice", "gpus": node.gpus * 2})))
    (tmp_path / "uneven.json").write_text(uneven.to_json())
    for options, word in REFUSED:
        words = [word.format(shared=shared, uneven=tmp_path / "uneven.json") for word in options.split(" ")]
        code, out, errors = engine("launch", saved, *words)
        assert (code, out) == (2, "") and word in errors.splitlines()[-1]
        assert not list(shared.iterdir())


@pytest.fixture
def engine(capsys, monkeypatch) -> CommandLine:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return CommandLine(capsys)


def test_gpus_of_this_machine(engine, monkeypatch, tmp_path):
    plug_in(monkeypatch, switched("NVIDIA A100-SXM4-80GB", 4, links=12))
    path = tmp_path / "cluster.json"
    answer = engine.json("detect", "-o", path)
    assert answer["gpus"] == [{"name": "NVIDIA A100-SXM4-80GB", "type": "A100-80", "memory": 80 * GIB}] * 4
    assert read_cluster(path) == Cluster.from_dict(answer["cluster"], "") and answer["saved"] == str(path)
    text = engine.text("detect")
    assert "4 × A100-80, links 300 GB/s" in text and "80 GiB" in text and "note: " in text and "saved" not in text


def test_no_gpu_is_said_kindly(engine, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    answer = engine.json("detect")
    assert (answer["gpus"], answer["cluster"], answer["saved"]) == ([], None, None)
    text = engine.text("detect")
    assert "no GPU attached" in text and "nvidia-ml-py is not installed" in text and "start from a preset" in text
    assert "no GPU on this machine" in engine.refused("detect", "-o", tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_a_name_that_is_not_known(engine, monkeypatch, tmp_path):
    plug_in(monkeypatch, [Gpu("NVIDIA H100 NVL", 94 * GIB, bus=at) for at in range(2)])
    path = tmp_path / "cluster.json"
    text = engine.text("detect")
    assert "NVIDIA H100 NVL" in text and "unknown" in text and "choose the nearest type" in text
    assert "'NVIDIA H100 NVL' with 94 GiB" in engine.refused("detect", "-o", path)
    assert not path.exists()
    assert "no GPU type 'H900'" in engine.refused("detect", "--type", "H900")
    engine.json("detect", "--type", "H100", "-o", path)
    assert [(gpu.type, gpu.memory) for gpu in read_cluster(path).gpus] == [("H100", 94 * GIB)] * 2


def test_a_saved_topology(engine, tmp_path):
    topology, path = tmp_path / "dgx.txt", tmp_path / "cluster.json"
    topology.write_text(printed(everywhere("NV18", 8), nics=8))
    assert "choose their type" in engine.refused("detect", "--topology", topology)
    assert "only 12 NVLinks" in engine.refused("detect", "--topology", topology, "--type", "A100-80")
    text = engine.text("detect", "--topology", topology, "--type", "H100", "-o", path)
    assert "node dgx: 8 × H100, links 450 GB/s" in text and f"saved the cluster: {path}" in text
    assert set(read_cluster(path).gpus) == {gpu_types()["H100"].gpu()}
    assert "there is no such file" in engine.refused("detect", "--topology", tmp_path / "none.txt")


def test_measured_pairs_as_a_cluster(engine, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    ends = [("a", "1b"), ("a", "43"), ("b", "1b")]
    for number, pair in enumerate(combinations(ends, 2)):
        (logs / f"{number}.out").write_text(pair_log(pair, 200e9 if pair[0][0] == pair[1][0] else 25e9))
    text = engine.text("inspect", *sorted(logs.glob("*.out")))
    assert "pairwise nccl-tests output; open all of it at once on the Cluster page, or give it to detect" in text
    alone = engine.json("inspect", logs / "0.out")
    assert alone["kind"] == "measurements" and "detect --pairs" in alone["checks"][0]["message"]
    (logs / "notes.md").write_text("measured in March")
    path = tmp_path / "ours.json"
    pairs, cluster = engine.json("detect", "--pairs", logs, "-o", path)["pairs"], read_cluster(path)
    assert (cluster.name, [len(node.gpus) for node in cluster.nodes]) == ("ours", [2, 1])
    assert pairs["gpus"] == ["a [1b]", "a [43]", "b [1b]"] and pairs["mean_error"] < 1e-3
    assert pairs["measured"][0] == [None, pytest.approx(200e9, rel=1e-3), pytest.approx(25e9, rel=1e-3)]
    text = engine.text("detect", "--pairs", *sorted(logs.glob("*.out")))
    assert "a [1b] and a [43]" in text and "node a: 2 × H100, links" in text and "one pair ran at a time" in text
    assert "choose one" in engine.refused("detect", "--pairs", logs, "--topology", tmp_path / "topo.txt")
    assert "not what nccl-tests prints" in engine.refused("detect", "--pairs", path)
