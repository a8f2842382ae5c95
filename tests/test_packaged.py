"""What the package aiconfigurator-core adds to the catalogue: GPUs, nodes and models, and what is said without it."""

from pathlib import Path

import pytest

from engine import formats
from engine.catalogue import gpu_types, packaged
from engine.catalogue.packaged import every_gpu_type, packaged_configs, packaged_gpu_types, packaged_node, system_of
from engine.errors import InputError
from engine.formats.packaged import packaged_config, packaged_model, packaged_models
from tests.costs.silicon import needs_tables


@pytest.fixture
def without_package(monkeypatch):
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    packaged_gpu_types.cache_clear()
    packaged_configs.cache_clear()
    yield
    packaged_gpu_types.cache_clear()
    packaged_configs.cache_clear()


@needs_tables
def test_gpus_that_only_the_package_has_come_beside_ours():
    theirs, ours = packaged_gpu_types(), gpu_types()
    assert {"B300-SXM", "GB200", "GB300", "H100-PCIe", "A100-PCIe", "L4"} <= set(theirs)
    assert not set(theirs) & set(ours) and every_gpu_type() == theirs | ours
    names = list(every_gpu_type())
    assert names[:4] == ["GB300", "GB200", "B300-SXM", "B200"] and names[-1] == "RTX 2080 Ti", "the fastest first"
    assert theirs["H100-PCIe"].memory_bandwidth == 2e12 and theirs["H100-PCIe"].flops_fp16 == 756.5e12
    for kind in theirs.values():
        assert 8e9 <= kind.memory <= 400e9 and 1e11 <= kind.memory_bandwidth <= 1e13
        assert 5e12 <= kind.flops_fp32 < kind.flops_fp16 <= 3e15
        assert 1e9 <= kind.bandwidth < kind.memory_bandwidth
        assert kind.source.endswith(f"systems/{system_of(kind.name)}.yaml")


@needs_tables
def test_systems_of_our_own_types_are_left_to_our_catalogue():
    folder = packaged.package_folder() / "systems"
    assert all((folder / f"{system}.yaml").is_file() for system in packaged.OURS)
    assert not {system_of(name) for name in packaged_gpu_types()} & set(packaged.OURS)


@needs_tables
def test_a_node_has_the_links_that_the_package_states():
    node = packaged_node("GB200", "tray")
    assert len(node.gpus) == 4 and node.link_bandwidth == 900e9
    assert node.gpus[0].send_bandwidth == 900e9  # nodes of a rack are joined by NVLink too
    assert "of one rack, 72 GPUs" in packaged_gpu_types()["GB200"].note
    with pytest.raises(InputError, match="no GPU type 'H200' in aiconfigurator-core; it has A100-PCIe"):
        packaged_node("H200", "node")


@needs_tables
def test_models_are_called_what_they_are_called_on_the_hub():
    models = packaged_models()
    assert len(models) > 60
    assert all(model.name == checkpoint.rpartition("/")[2] for checkpoint, model in models.items())
    deepseek = models["deepseek-ai/DeepSeek-V3"]
    assert (deepseek.layers, deepseek.dense_layers, deepseek.experts, deepseek.dtype) == (61, (0, 1, 2), 256, "fp8")
    assert "meta-llama/Meta-Llama-3.1-8B" in packaged_configs() and "meta-llama/Meta-Llama-3.1-8B" not in models


@needs_tables
def test_a_packaged_model_is_found_by_its_name():
    assert formats.read_model(Path("deepseek-ai/DeepSeek-V3")) == packaged_model("deepseek-v3")
    assert packaged_config("DeepSeek-V3") == packaged_configs()["deepseek-ai/DeepSeek-V3"]
    with pytest.raises(InputError, match="no packaged model is called nobody/nothing"):
        packaged_config("nobody/nothing")
    with pytest.raises(InputError, match="nothing"):
        formats.read_model(Path("nobody/nothing"))
    with pytest.raises(InputError, match="is not an MoE model"):
        packaged_model("meta-llama/Meta-Llama-3.1-8B")


@needs_tables
def test_a_file_goes_before_a_packaged_model_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("deepseek-ai").mkdir()
    Path("deepseek-ai/DeepSeek-V3").write_text("mine")
    with pytest.raises(InputError, match=r"DeepSeek-V3.*\.json"):
        formats.read_model(Path("deepseek-ai/DeepSeek-V3"))


def test_without_the_package_our_catalogue_stands_alone(without_package):
    assert packaged_gpu_types() == {} and every_gpu_type() == gpu_types()
    for work in (packaged_models, lambda: packaged_model("deepseek-ai/DeepSeek-V3")):
        with pytest.raises(InputError) as error:
            work()
        assert str(error.value) == (
            "the packaged models need the package aiconfigurator-core (Linux x86-64 only), which is not installed"
        )
    with pytest.raises(InputError, match="it has none: it is not installed"):
        packaged_node("GB200", "tray")
