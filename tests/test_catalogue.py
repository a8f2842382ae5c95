"""The catalogue's data files: every entry loads, and its figures have the right units and proportions."""

import json
from importlib.resources import files

import pytest

from engine import catalogue
from engine.catalogue import cluster_presets, gpu, gpu_types, model_presets, node_types
from engine.cluster import Cluster
from engine.errors import InputError

GIB = 2**30
FILES = {"gpus": gpu_types, "nodes": node_types, "clusters": cluster_presets, "models": model_presets}
TENSOR_CORES_OVER_FP32 = {
    "RTX 2080 Ti": 4,
    "V100-16": 8,
    "V100-32": 8,
    "A100-40": 16,
    "A100-80": 16,
    "L40S": 4,
    "H100": 15,
    "H200": 15,
    "B200": 30,
}


@pytest.mark.parametrize("name", FILES)
def test_every_entry_has_a_name_of_its_own_and_a_source(name):
    rows = json.loads(files(catalogue).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    entries = FILES[name]()
    assert len(entries) == len(rows) > 0
    for key, entry in entries.items():
        assert key == entry.name
        assert len(entry.source) > 5
        assert 2018 <= int(entry.date[:4]) <= 2026


def test_the_asked_for_types_are_there():
    assert set(TENSOR_CORES_OVER_FP32) <= set(gpu_types())


@pytest.mark.parametrize("kind", gpu_types().values(), ids=lambda kind: kind.name)
def test_gpu_units(kind):
    assert kind.memory % GIB == 0
    assert 8 * GIB <= kind.memory <= 300 * GIB
    assert 500e9 <= kind.memory_bandwidth <= 10e12
    assert 10e12 <= kind.flops_fp32 <= 100e12
    # Twice this would be the rate with sparsity.
    assert kind.flops_fp16 / kind.flops_fp32 == pytest.approx(TENSOR_CORES_OVER_FP32[kind.name], rel=0.02)
    assert kind.flops_fp8 == 0 or kind.flops_fp8 / kind.flops_fp16 == pytest.approx(2, rel=0.02)
    assert 1e9 <= kind.bandwidth < kind.memory_bandwidth / 10


@pytest.mark.parametrize("kind", node_types().values(), ids=lambda kind: kind.name)
def test_node_units(kind):
    node = kind.node("a node")
    assert len(node.gpus) == kind.count
    assert {gpu.type for gpu in node.gpus} == {kind.gpu}
    assert {gpu.send_bandwidth for gpu in node.gpus} == {gpu.receive_bandwidth for gpu in node.gpus} == {kind.bandwidth}
    assert 1e9 <= kind.bandwidth <= 100e9
    assert kind.link_bandwidth is None or kind.bandwidth < kind.link_bandwidth <= 1e12
    assert 0 <= kind.link_latency <= kind.fabric_latency <= 100e-6


@pytest.mark.parametrize("preset", cluster_presets().values(), ids=lambda preset: preset.name)
def test_cluster_presets(preset):
    cluster = preset.cluster
    assert cluster.name == preset.name
    assert preset.description.endswith(".")
    assert len(cluster.gpus) == sum(node_types()[kind].count * count for kind, count in preset.nodes)
    assert Cluster.from_json(cluster.to_json(), preset.name) == cluster


def test_the_mixed_cluster_is_auroras():
    cluster = cluster_presets()["mixed-8"].cluster
    assert cluster.values("send_bandwidth").tolist() == [12.5e9] * 2 + [10e9] * 2 + [6.25e9] * 2 + [5e9] * 2
    assert all(node.link_bandwidth is None for node in cluster.nodes)
    for field in ("flops_fp32", "flops_fp16", "memory_bandwidth", "memory"):
        values = cluster.values(field)
        assert (values[:-1] >= values[1:]).all(), f"{field} does not fall with the bandwidth"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("DeepSeek-V2-Lite", 15.7e9),
        ("DeepSeek-R1", 671e9),
        ("Mixtral-8x7B", 46.7e9),
        ("Qwen3-30B-A3B", 30.5e9),
        ("Qwen1.5-MoE-A2.7B", 14.3e9),
    ],
)
def test_experts_are_most_of_a_models_published_size(name, parameters):
    model = model_presets()[name].model
    experts = len(model.moe_layers) * (model.experts + model.shared_experts) * model.ffn_matrices
    assert 0.85 <= experts * model.d_model * model.d_ff / parameters <= 0.99


def test_gpu_by_name():
    assert gpu("H100").send_bandwidth == gpu("H100").receive_bandwidth == 50e9
    assert gpu("H100", 10e9).receive_bandwidth == 10e9
    assert gpu("H100", 10e9, 5e9).receive_bandwidth == 5e9
    with pytest.raises(InputError, match=r"'H1000'.*A100-80.*B200"):
        gpu("H1000")
