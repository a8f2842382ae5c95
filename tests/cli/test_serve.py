"""`serve` and `catalogue`: whole steps of serving on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.catalogue import cluster_presets
from engine.errors import InputError
from engine.formats import read_cluster, read_model
from tests.costs.silicon import needs_tables


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
    files["step"].write_text(json.dumps({"phase": "decode", "sequences": 31, "context": 1, "overlap": "two-batch"}))
    assert "31 sequences on a GPU are odd" in engine.refused("serve", files["linear"], *step, *config)


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


def test_a_name_of_the_catalogue_needs_no_file(engine, tmp_path):
    row = next(row for row in engine.json("catalogue")["clusters"] if row["name"] == "hgx-h100-4-nodes")
    assert (row["gpus"], row["nodes"]) == (32, 4) and row["source"]
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
        (["X1", "-o", path], "no GPU type 'X1' in the catalogue; it has GB300, GB200"),
        (["-o", path], "-o writes nodes of one GPU type as a cluster; name the type"),
    ):
        assert message in engine.refused("catalogue", *arguments)
