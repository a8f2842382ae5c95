"""Steps of serving against AIConfigurator's own, operator by operator."""

import json
import logging
from dataclasses import replace

import pytest

from engine.catalogue import packaged
from engine.costs import Datasheet
from engine.errors import InputError
from engine.formats.packaged import packaged_config
from engine.problem import make_problem
from engine.serving.aiconfigurator import AiconfiguratorOperators
from engine.serving.step import by_kind
from engine.training import balanced_load
from tests.benchmarks.bench_serving import CLUSTER, MEASURED, served, sources_of_operators, theirs
from tests.costs.silicon import needs_tables
from tests.serving.samples import DECODE, DEEPSEEK, DEEPSEEK_SIZES, PREFILL, QWEN, QWEN_SIZES

pytestmark = needs_tables


@pytest.fixture(scope="module")
def deepseek():
    config = packaged_config("deepseek-ai/DeepSeek-V3")
    return AiconfiguratorOperators(config, DEEPSEEK, DEEPSEEK_SIZES, "H200")


@pytest.fixture(scope="module")
def qwen():
    return AiconfiguratorOperators(packaged_config("Qwen/Qwen3-30B-A3B"), QWEN, QWEN_SIZES, "H200")


def test_deepseek_decodes_with_the_attention_of_wide_expert_parallelism(deepseek):
    """Its command line takes 12.2 ms for attention at a length of 2500, 0.24 ms for normalisation and 1.56 ms for shared
    experts in 61 layers, of which 58 have some."""
    operators = deepseek.operators(DECODE)
    kinds, names = by_kind(operators), {operator.name for operator in operators}
    assert kinds["attention"] == pytest.approx((12.206 + 0.757) * 1e-3, rel=2e-3)
    assert kinds["norm"] == pytest.approx(0.2413e-3, rel=1e-3)
    assert kinds["shared expert"] == pytest.approx(1.5567e-3 * 58 / 61, rel=0.1)
    assert set(kinds) == {"attention", "norm", "embedding", "shared expert", "dense FFN", "head"}
    assert "qkv_a_proj_gemm" in names and "downscale_gemm" not in names, "the down-projection counts once"


def test_dense_layers_and_head_are_those_of_the_model(deepseek):
    rows = {operator.name: operator for operator in deepseek.operators(PREFILL)}
    assert rows["dense FFN"].layers == 3 and rows["shared experts"].layers == 58 and rows["output head"].layers == 1
    assert rows["attention"].origin == "silicon"
    # A dense layer is nine shared experts wide.
    per_layer = {name: rows[name].seconds / rows[name].layers for name in ("dense FFN", "shared experts")}
    assert 5 < per_layer["dense FFN"] / per_layer["shared experts"] < 10


def test_a_longer_context_costs_attention_alone(deepseek):
    longer = by_kind(deepseek.operators(DECODE.model_copy(update={"context": 8000})))
    here = by_kind(deepseek.operators(DECODE))
    assert longer.pop("attention") > 1.5 * here.pop("attention")
    assert longer == pytest.approx(here)


def test_grouped_heads_go_by_the_usual_graph(qwen):
    step = DECODE.model_copy(update={"kv_dtype": "bf16"})
    rows = {operator.name: operator for operator in qwen.operators(step)}
    assert set(rows) == {"embedding", "add_norm_1", "qkv_gemm", "attention", "proj_gemm", "add_norm_2", "output head"}
    assert rows["attention"].origin == "silicon" and rows["attention"].kind == "attention"


def test_gpus_that_only_the_package_has_are_timed_too(deepseek):
    here, faster = (sum(by_kind(replace(deepseek, gpu_type=kind).operators(DECODE)).values()) for kind in ("H200", "GB200"))
    assert here / 2 < faster < here


def test_nothing_is_logged_or_left_silent(deepseek, capfd, caplog):
    replace(deepseek, gpu_type="H100").operators(DECODE)
    assert capfd.readouterr() == ("", "") and not caplog.records
    logging.getLogger("aiconfigurator_core").warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]


def test_a_gpu_or_model_that_it_does_not_know_is_named_and_a_missing_package(deepseek, qwen, tmp_path, monkeypatch):
    unknown = tmp_path / "config.json"
    unknown.write_text(json.dumps({"architectures": ["NobodysModel"], "num_hidden_layers": 2}))
    for source, step, says in (
        (replace(deepseek, gpu_type="V100-16"), DECODE, r"has no measurements of V100-16 \(it has A100-40, .*; use the d"),
        (replace(deepseek, gpu_type="H100-PCIe"), DECODE, "has no measurements of sglang on h100_pcie; use the datash"),
        (replace(qwen, config=unknown), DECODE, "has no Qwen3-30B-A3B on h200_sxm: .*; use the datasheet"),
        # Measured with keys and values at 16 bits only.
        (qwen, PREFILL, "cannot time Qwen3-30B-A3B: .*; use the datasheet"),
    ):
        with pytest.raises(InputError, match=f"^aiconfigurator {says}") as error:
            source.operators(step)
        assert "site-packages" not in str(error.value)
    monkeypatch.setattr(packaged, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="operators by aiconfigurator need the package aiconfigurator-core"):
        deepseek.operators(DECODE)


@pytest.mark.parametrize("step", [DECODE, PREFILL], ids=lambda step: step.phase)
@pytest.mark.parametrize("cost", [MEASURED, Datasheet()], ids=["network measured", "network as drawn"])
def test_a_whole_step_is_near(step, cost):
    problem = make_problem(balanced_load(DEEPSEEK), CLUSTER, DEEPSEEK, cost)
    figures = served("linear", problem, step, sources_of_operators()["operators measured"])
    reported = theirs(step)
    assert figures.seconds * 1e3 == pytest.approx(sum(reported.values()), rel=0.1)
    if cost is MEASURED:
        for kind in ("attention", "shared expert", "dispatch", "ffn", "combine"):
            # They count 61 MoE layers, of which three are dense.
            layers = 1 if kind == "attention" else len(DEEPSEEK.moe_layers) / DEEPSEEK.layers
            assert figures.parts[kind] * 1e3 == pytest.approx(reported[kind] * layers, rel=0.1), kind
