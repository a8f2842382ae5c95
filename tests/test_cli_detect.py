"""`detect`: the GPUs of this machine, or those of a saved topology, as a cluster file."""

import sys
from itertools import combinations

import pytest
import torch

from engine.catalogue import gpu_types
from engine.formats import read_cluster
from tests.cases.files import everywhere, pair_log, printed
from tests.launch.nvml import GIB, Gpu, plug_in, switched
from tests.test_cli import CommandLine


@pytest.fixture
def engine(capsys, monkeypatch) -> CommandLine:
    """On a machine whose PyTorch has no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return CommandLine(capsys)


def test_gpus_of_this_machine(engine, monkeypatch, tmp_path):
    plug_in(monkeypatch, switched("NVIDIA A100-SXM4-80GB", 4, links=12))
    path = tmp_path / "cluster.json"
    answer = engine.json("detect", "-o", path)
    assert answer["gpus"] == [{"name": "NVIDIA A100-SXM4-80GB", "type": "A100-80", "memory": 80 * GIB}] * 4
    cluster = read_cluster(path)
    assert cluster.model_dump(exclude_none=True) == read_cluster(path).from_dict(answer["cluster"], "").model_dump(
        exclude_none=True
    )
    assert cluster.nodes[0].link_bandwidth == pytest.approx(300e9) and answer["saved"] == str(path)
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
    (logs / "notes.md").write_text("measured in March")
    path = tmp_path / "ours.json"
    answer = engine.json("detect", "--pairs", logs, "-o", path)
    cluster = read_cluster(path)
    assert (cluster.name, [len(node.gpus) for node in cluster.nodes]) == ("ours", [2, 1])
    assert cluster.nodes[0].link_bandwidth == pytest.approx(200e9, rel=1e-3)
    assert cluster.gpus[2].send_bandwidth == pytest.approx(25e9, rel=1e-3)
    pairs = answer["pairs"]
    assert pairs["gpus"] == ["a [1b]", "a [43]", "b [1b]"]
    assert pairs["measured"][0] == [None, pytest.approx(200e9, rel=1e-3), pytest.approx(25e9, rel=1e-3)]
    assert pairs["drawn"][0] == pairs["measured"][0] or pairs["mean_error"] < 1e-3
    text = engine.text("detect", "--pairs", *sorted(logs.glob("*.out")))
    assert "a [1b] and a [43]" in text and "node a: 2 × H100, links" in text and "one pair ran at a time" in text
    saved = tmp_path / "topo.txt"
    assert "choose one" in engine.refused("detect", "--pairs", logs, "--topology", saved)
    assert "not what nccl-tests prints" in engine.refused("detect", "--pairs", path)


def test_inspect_says_that_logs_of_pairs_are_a_set(engine, tmp_path):
    for number, ends in enumerate(combinations([("a", "1b"), ("a", "43"), ("b", "1b")], 2)):
        (tmp_path / f"{number}.out").write_text(pair_log(ends, 25e9))
    answer = engine.json("inspect", tmp_path)
    assert (answer["kind"], answer["format"], answer["checks"][0]["severity"]) == ("pairs", "nccl-pairs", "ok")
    text = engine.text("inspect", *sorted(tmp_path.glob("*.out")))
    assert "pairwise nccl-tests output; open all of it at once on the Cluster page, or give it to detect" in text
    alone = engine.json("inspect", tmp_path / "0.out")
    assert alone["kind"] == "measurements" and "detect --pairs" in alone["checks"][0]["message"]
