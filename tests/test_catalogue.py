"""The catalogue, its package, models that recordings may come from, and the sample files."""

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from engine import catalogue, formats
from engine.catalogue import cluster_of_gpus, cluster_presets, gpu, gpu_types, model_presets, node_types, packaged
from engine.catalogue import packaged as packages
from engine.cluster import Cluster
from engine.compare.synthetic import Recipe
from engine.formats.packaged import packaged_config, packaged_model, packaged_models
from engine.workload import ExpertLoad, TrafficMatrix
from tests.cases.cli import SAMPLES
from tests.cases.refusals import refusal
from tests.cases.samples import sample, sample_model
from tests.costs.silicon import needs_tables
from tests.strategies import make_model

GIB = 2**30
FILES = {"gpus": gpu_types, "nodes": node_types, "clusters": cluster_presets, "models": model_presets}
TENSOR_CORES_OVER_FP32 = {"RTX 2080 Ti": 4, "L40S": 4, "H100": 15, "H200": 15, "B200": 30}
TENSOR_CORES_OVER_FP32 |= {"V100-16": 8, "V100-32": 8, "A100-40": 16, "A100-80": 16}
TENSOR_CORES_OVER_FP32 |= {"MI300X": 8, "MI325X": 8, "MI355X": 16}
TENSOR_CORES_OVER_FP32 |= {"Ascend-A2-376": 32.2, "Ascend-A2-313": 32.8, "Ascend-A2-280": 30.7, "Ascend-A3": 32.2}


@pytest.mark.parametrize("name", FILES)
def test_every_entry_has_a_name_of_its_own_and_a_source_and_the_asked_for_types_are_there(name):
    assert set(TENSOR_CORES_OVER_FP32) <= set(gpu_types())
    rows = json.loads(files(catalogue).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    entries = FILES[name]()
    assert len(entries) == len(rows) > 0
    for key, entry in entries.items():
        assert key == entry.name and len(entry.source) > 5 and 2018 <= int(entry.date[:4]) <= 2026


@pytest.mark.parametrize("kind", gpu_types().values(), ids=lambda kind: kind.name)
def test_gpu_units(kind):
    assert kind.memory % GIB == 0
    assert 8 * GIB <= kind.memory <= 300 * GIB
    assert 500e9 <= kind.memory_bandwidth <= 10e12
    assert 8e12 <= kind.flops_fp32 <= 200e12
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
    assert cluster.name == preset.name and preset.description.endswith(".")
    assert len(cluster.gpus) == sum(node_types()[kind].count * count for kind, count in preset.nodes)
    assert Cluster.from_json(cluster.to_json(), preset.name) == cluster


def test_the_mixed_cluster_is_auroras():
    cluster = cluster_presets()["mixed-8"].cluster
    assert cluster.values("send_bandwidth").tolist() == [12.5e9] * 2 + [10e9] * 2 + [6.25e9] * 2 + [5e9] * 2
    assert all(node.link_bandwidth is None for node in cluster.nodes)
    for field in ("flops_fp32", "flops_fp16", "memory_bandwidth", "memory"):
        values = cluster.values(field)
        assert (values[:-1] >= values[1:]).all(), f"{field} does not fall with the bandwidth"


PUBLISHED = {"DeepSeek-V2-Lite": 15.7e9, "DeepSeek-R1": 671e9, "Mixtral-8x7B": 46.7e9, "Qwen3-30B-A3B": 30.5e9}
PUBLISHED["Qwen1.5-MoE-A2.7B"] = 14.3e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_experts_are_most_of_a_models_published_size(name):
    model = model_presets()[name].model
    experts = len(model.moe_layers) * (model.experts + model.shared_experts) * model.ffn_matrices
    assert 0.85 <= experts * model.d_model * model.d_ff / PUBLISHED[name] <= 0.99


def test_gpu_by_name():
    assert gpu("H100").send_bandwidth == gpu("H100").receive_bandwidth == 50e9
    assert (gpu("H100", 10e9).receive_bandwidth, gpu("H100", 10e9, 5e9).receive_bandwidth) == (10e9, 5e9)
    assert re.search(r"'H1000'.*A100-80.*B200", refusal(gpu, "H1000"))


@needs_tables
def test_gpus_that_only_the_package_has_come_beside_ours():
    theirs, ours = packages.packaged_gpu_types(), gpu_types()
    assert {"B300-SXM", "GB200", "GB300", "H100-PCIe", "A100-PCIe", "L4"} <= set(theirs)
    assert not set(theirs) & set(ours) and packages.every_gpu_type() == theirs | ours
    folder = packaged.package_folder() / "systems"
    assert all((folder / f"{system}.yaml").is_file() for system in packaged.OURS), "left to our catalogue"
    assert not {packages.system_of(name) for name in theirs} & set(packaged.OURS)
    names = list(packages.every_gpu_type())
    assert names[:5] == ["MI355X", "GB300", "GB200", "B300-SXM", "B200"] and names[-1] == "RTX 2080 Ti", "the fastest first"
    assert theirs["H100-PCIe"].memory_bandwidth == 2e12 and theirs["H100-PCIe"].flops_fp16 == 756.5e12
    for kind in theirs.values():
        assert 8e9 <= kind.memory <= 400e9 and 1e11 <= kind.memory_bandwidth <= 1e13
        assert 5e12 <= kind.flops_fp32 < kind.flops_fp16 <= 3e15
        assert 1e9 <= kind.bandwidth < kind.memory_bandwidth
        assert kind.source.endswith(f"systems/{packages.system_of(kind.name)}.yaml")


@needs_tables
def test_a_node_has_the_links_that_the_package_states():
    node = packages.packaged_node("GB200", "tray")
    assert len(node.gpus) == 4 and node.link_bandwidth == 900e9
    assert node.gpus[0].send_bandwidth == 900e9  # nodes of a rack are joined by NVLink too
    assert "of one rack, 72 GPUs" in packages.packaged_gpu_types()["GB200"].note
    assert "no GPU type 'H200' in aiconfigurator-core; it has A100-PCIe" in refusal(packages.packaged_node, "H200", "node")


@needs_tables
def test_models_are_called_what_they_are_called_on_the_hub():
    models = packaged_models()
    assert len(models) > 60
    assert all(model.name == checkpoint.rpartition("/")[2] for checkpoint, model in models.items())
    deepseek = models["deepseek-ai/DeepSeek-V3"]
    assert (deepseek.layers, deepseek.dense_layers, deepseek.experts, deepseek.dtype) == (61, (0, 1, 2), 256, "fp8")
    assert "meta-llama/Meta-Llama-3.1-8B" in packages.packaged_configs() and "meta-llama/Meta-Llama-3.1-8B" not in models


@needs_tables
def test_a_packaged_model_is_found_by_its_name_behind_a_file_of_that_name(tmp_path, monkeypatch):
    assert formats.read_model(Path("deepseek-ai/DeepSeek-V3")) == packaged_model("deepseek-v3")
    assert packaged_config("DeepSeek-V3") == packages.packaged_configs()["deepseek-ai/DeepSeek-V3"]
    assert "no packaged model is called nobody/nothing" in refusal(packaged_config, "nobody/nothing")
    assert "nothing" in refusal(formats.read_model, Path("nobody/nothing"))
    assert "is not an MoE model" in refusal(packaged_model, "meta-llama/Meta-Llama-3.1-8B")
    monkeypatch.chdir(tmp_path)
    Path("deepseek-ai").mkdir()
    Path("deepseek-ai/DeepSeek-V3").write_text("mine")
    assert re.search(r"DeepSeek-V3.*\.json", refusal(formats.read_model, Path("deepseek-ai/DeepSeek-V3")))


def test_without_the_package_our_catalogue_stands_alone(monkeypatch, request):
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    for cached in (packages.packaged_gpu_types, packages.packaged_configs):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    assert packages.packaged_gpu_types() == {} and packages.every_gpu_type() == gpu_types()
    said = "the packaged models need the package aiconfigurator-core (Linux x86-64 only), which is not installed"
    assert said == refusal(packaged_models) == refusal(packaged_model, "deepseek-ai/DeepSeek-V3")
    assert "it has none: it is not installed" in refusal(packages.packaged_node, "GB200", "tray")


def test_models_of_identical_sizes_are_one_and_others_are_not_and_a_traffic_matrix_tells_none():
    model = make_model(3, 8)
    models = {
        "a": model,
        "wider": model.model_copy(update={"d_ff": 2 * model.d_ff}),
        "b": model.model_copy(update={"name": "b", "batch": 7, "sequence_length": 9}),
        "deeper": make_model(4, 8),
        "more": make_model(3, 9),
        "k": model.model_copy(update={"experts_per_token": model.experts_per_token + 1}),
    }
    recording = Recipe(tokens=16, skew=0.6, affinity=0.3).draw(model)
    assert packages.models_that_fit(recording, models) == [("a", "b"), ("wider",)]
    loads = ExpertLoad("loads", np.ones((3, 8)), None)
    assert packages.models_that_fit(loads, models) == [("a", "b"), ("wider",), ("k",)], "loads do not tell experts per token"
    assert packages.models_that_fit(TrafficMatrix("t", np.ones((3, 8, 8)), 1.0), models) == []


RECORDINGS = sorted(path.stem for path in SAMPLES.glob("tiny-moe/*.npz"))


@pytest.mark.parametrize("name", RECORDINGS)
def test_recording(name):
    trace, model = sample(name), sample_model(name.partition("-")[0], 8)
    assert trace.experts.dtype == np.int16
    assert trace.experts.min() >= 0 and trace.experts.max() < 16
    model.check_recording(trace.layers, trace.num_experts, trace.k, name)
    assert trace.tokens == model.batch * model.sequence_length
    assert trace.sequence.dtype == np.int32
    np.testing.assert_array_equal(np.unique(trace.sequence, return_counts=True)[1], np.full(96, 128))
    assert (np.diff(np.sort(trace.experts, axis=-1), axis=-1) > 0).all(), "a token chose an expert twice"


def test_samples_are_those_of_the_catalogue():
    names = [f"{model}-{kind}" for model in ("alpha", "beta") for kind in ("code", "man", "prose")]
    assert sorted([*names, "alpha-early-code", "alpha-mid-code"]) == RECORDINGS
    cluster = Cluster.from_json((SAMPLES / "mixed-8.json").read_bytes(), "mixed-8.json")
    assert cluster == cluster_presets()["mixed-8"].cluster
    for name in ("alpha", "beta"):
        assert sample_model(name, 8) == model_presets()[f"tiny-moe-{name}"].model


def test_the_readmes_recipe_makes_the_traffic_again(tmp_path, monkeypatch):
    (recipe,) = re.findall(r"```python\n(.*?)```", (SAMPLES / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    shutil.copytree(SAMPLES / "tiny-moe", tmp_path / "tiny-moe")
    monkeypatch.chdir(tmp_path)
    exec(recipe, {})
    assert Path("traffic-8.csv").read_text() == (SAMPLES / "traffic-8.csv").read_text()


@pytest.mark.parametrize(
    ("name", "sizes"), [("4xH100", [4]), ("32xh100", [8] * 4), ("1xB200", [1]), ("12xH100", None), ("4xX", None)]
)
def test_so_many_gpus_in_nodes_of_the_catalogue(name, sizes):
    cluster = cluster_of_gpus(name)
    assert (cluster and cluster.node_sizes) == sizes
    assert cluster is None or cluster.nodes[0].link_bandwidth
