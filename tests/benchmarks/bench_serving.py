"""A whole step of serving compared with aiconfigurator's: `python -m tests.benchmarks.bench_serving [FILE]`.

DeepSeek-V3 on 32 H200, decode of 64 sequences per GPU (2000 tokens in, 1000 out) and prefill of two prompts of 4096. First with
balanced routing, every kind of operator with those of aiconfigurator's own graph for wide expert parallelism; then with the
skew of a recording (FILE, or one that is made), and the gain of plans; last the fused kernels on held-out power-law rows.
aiconfigurator counts all 61 layers as MoE layers, the down-projection of latent attention twice, and leaves head, router and
one normalisation out.
"""

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from engine.catalogue import gpu, node_types
from engine.catalogue.packaged import packaged_gpu_types
from engine.cluster import Cluster
from engine.compare.synthetic import synthetic
from engine.compare.trust.collectives import skew_errors
from engine.costs import Combined, Datasheet, DeepEP, silicon
from engine.costs.fused_experts import SIZES, kernel_table
from engine.errors import InputError
from engine.formats import read_sizes, read_workload
from engine.formats.packaged import packaged_config, packaged_models
from engine.model import MoEModel
from engine.plan import Plan, Travel
from engine.problem import Problem, make_problem
from engine.serving.aiconfigurator import BACKEND, NODE, WIDE, AiconfiguratorOperators, handle_of
from engine.serving.figures import ServingFigures
from engine.serving.roofline import RooflineOperators
from engine.serving.step import OperatorSource, ServingStep, seconds_of
from engine.simulate.serving import serve, with_fused_experts
from engine.systems import SYSTEMS
from engine.systems.base import run
from engine.training import balanced_load
from engine.workload import Workload
from tests.benchmarks.shared import RECIPE, columns
from tests.serving.samples import DECODE, DEEPSEEK, PREFILL, h200

CHECKPOINT, SYSTEM, CLUSTER = "deepseek-ai/DeepSeek-V3", "h200_sxm", h200(4)
MEASURED = Combined(Datasheet(), DeepEP())
TRAVEL = {
    "decode": Travel(unit="copies", dispatch="fp8", combine="bf16"),
    "prefill": Travel(unit="node", dispatch="fp8", combine="bf16"),
}
"""As DeepEP's low-latency and normal kernels send."""

KINDS = {
    "attention": "attention",
    "qkv_a_proj_gemm": "attention",
    "downscale_gemm": "attention",
    "embedding": "embedding",
    "add_norm_1": "norm",
    "gate_ffn1_gemm": "shared expert",
    "act_gate": "shared expert",
    "ffn2_gemm": "shared expert",
    "moe_dispatch": "dispatch",
    "moe": "ffn",
    "moe_combine": "combine",
}
"""Operators of aiconfigurator's graph and their names here."""

NUMBERS = {
    "bfloat16": ("bf16", None),
    "fp8_block": ("fp8", None),
    "int4_wo": ("bf16", 4.5),
    "w4a16_mxfp4": ("bf16", 4.25),
    "w4a8_mxfp4_mxfp8": ("fp8", 4.25),
    "nvfp4": ("fp8", 4.5),
}
"""A model's dtype and bits of an expert's weight, by the tables' formats."""


def main() -> None:
    sources = sources_of_operators()
    for step in (DECODE, PREFILL):
        beside(step, sources)
    workload = read_workload(Path(sys.argv[1])) if sys.argv[1:] else synthetic(DEEPSEEK, RECIPE)
    source = sources["operators measured"]
    problem = make_problem(workload, CLUSTER, DEEPSEEK, MEASURED)
    formats = {"": "10", "overlap": "12", "plan": "10", "step ms": "10.2f", "MoE ms": "10.2f"}
    show = columns(formats | {"tokens/s/GPU": "14.0f", "gain": "8.1%", "GB": "7.1f"}, f"{workload.name}: tokens/s/GPU")
    for step in (DECODE, PREFILL):
        for overlap in ("none", "two-batch"):
            here = step.model_copy(update={"overlap": overlap})
            figures = {system: served(system, problem, here, source) for system in ("linear", "eplb")}
            for system, row in figures.items():
                took = row.seconds * 1e3, sum(row.moe.values()) * 1e3
                gain, memory = row.gain_over(figures["linear"]), row.memory.total / 1e9
                show(step.phase, overlap, system, *took, row.tokens_per_second, gain, memory)
    beside_a_server(workload)
    power_laws()
    datasheet_beside_measurements()


def sources_of_operators() -> dict[str, OperatorSource]:
    config = packaged_config(CHECKPOINT)
    sizes, card = read_sizes(config), CLUSTER.gpus[0]
    return {
        "operators measured": AiconfiguratorOperators(config, DEEPSEEK, sizes, card.type),
        "by datasheet": RooflineOperators(DEEPSEEK, sizes, card),
    }


def beside(step: ServingStep, sources: dict[str, OperatorSource]) -> None:
    """Every kind of operator in ms."""
    milliseconds = {"aiconfigurator": theirs(step)}
    measured, roofline = sources.values()
    for name, cost, source in (
        ("ours, measured", MEASURED, measured),
        ("network as drawn", Datasheet(), measured),
        ("operators by datasheet", MEASURED, roofline),
    ):
        problem = make_problem(balanced_load(DEEPSEEK), CLUSTER, DEEPSEEK, cost)
        parts = served("linear", problem, step, source).parts
        milliseconds[name] = {kind: seconds * 1e3 for kind, seconds in parts.items()}
    table = pd.DataFrame(milliseconds).fillna(0.0)
    total = table.sum()
    table.loc["total"] = total
    table = table.map("{:.2f}".format)
    table.loc["error"] = (total / total["aiconfigurator"] - 1).map("{:.1%}".format)
    table.loc["tokens/s/GPU"] = (step.tokens / total * 1e3).map("{:.0f}".format)
    print(f"\n{step.phase}, ms\n{table.to_string()}")


def theirs(step: ServingStep, distribution: str = "balanced") -> dict[str, float]:
    """Milliseconds by kind of aiconfigurator's own step with DeepEP, which its command line reports too."""
    logging.disable(logging.CRITICAL)
    try:
        from aiconfigurator_core.sdk import engine, perf_database
        from aiconfigurator_core.sdk.config_builders import build_model_config
        from aiconfigurator_core.sdk.models import get_model

        gpus = len(CLUSTER.gpus)
        settings = build_model_config(1, 1, gpus, 1, gpus, fmha_quant_mode="fp8_block", kvcache_quant_mode="fp8")
        settings.moe_comm_backend, settings.num_gpus_per_node = WIDE, NODE
        settings.system, settings.workload_distribution = SYSTEM, distribution
        version = engine._literal_backend_version(SYSTEM, BACKEND, None, None, None)
        graph = get_model(CHECKPOINT, settings, BACKEND)
        database = perf_database.get_database(SYSTEM, BACKEND, version)
        handle = handle_of(graph, CHECKPOINT, SYSTEM, version, database)
        if step.phase == "decode":
            every = list(range(len(graph.generation_ops)))
            rows = handle.evaluate_generation_ops(every, batch_size=step.sequences, s=round(step.keys))
        else:
            every = list(range(len(graph.context_ops)))
            rows = handle.evaluate_context_ops(every, batch_size=step.sequences, s=step.context)
    finally:
        logging.disable(logging.NOTSET)
    seconds: dict[str, float] = {}
    for name, milliseconds, *_ in rows:
        kind = KINDS[name.removeprefix("generation_").removeprefix("context_")]
        seconds[kind] = seconds.get(kind, 0.0) + milliseconds
    return seconds


def served(system: str, problem: Problem, step: ServingStep, source: OperatorSource) -> ServingFigures:
    with contextlib.redirect_stderr(io.StringIO()):
        plan = run(SYSTEMS[system], problem).result.solution
    plan = Plan.model_validate(dict(plan) | {"travel": TRAVEL[step.phase], "claim": None})
    return serve(plan, with_fused_experts(problem, plan, step), step, source, source.sizes).figures


def beside_a_server(workload: Workload) -> None:
    """SGLang's report on nodes of eight H100 (lmsys.org/blog/2025-05-05-large-scale-ep): with prompts of 2000 tokens 52.3
    thousand of them a second and node, and 22.3 thousand generated ones; two batches won 27 to 35 % in prefill."""
    print("\nDeepSeek-V3 on nodes of eight H100, EPLB: thousand tokens per second and node")
    kind, config = node_types()["hgx-h100"], packaged_config(CHECKPOINT)
    source = AiconfiguratorOperators(config, DEEPSEEK, read_sizes(config), kind.gpu)
    for phase, nodes, sequences, reported in (("prefill", 4, 8, 52.3), ("decode", 9, 256, 22.3)):
        drawn = tuple(kind.node(f"node {index}") for index in range(nodes))
        cluster = Cluster(name=f"{nodes} nodes", nodes=drawn, latency=kind.fabric_latency)
        problem = make_problem(workload, cluster, DEEPSEEK, MEASURED)
        step = ServingStep(phase=phase, sequences=sequences, context=2000, output=100, kv_dtype="fp8")
        alone = served("eplb", problem, step, source)
        both = served("eplb", problem, step.model_copy(update={"overlap": "two-batch"}), source)
        rates = [figures.tokens_per_second * 8 / 1e3 for figures in (alone, both)]
        gain = f"{both.gain_over(alone):+.0%}"
        print(f"{phase:>10}: reported {reported}, here {rates[0]:.1f}, two batches {rates[1]:.1f} ({gain})")


def power_laws() -> None:
    """Fused kernels on the power-law rows that no fit has seen: every GPU and all sizes of gated experts that were measured."""
    print("\nfused kernels on held-out rows of power laws: relative error")
    for folder in sorted(path.name for path in silicon._data_folder().iterdir() if (path / "moe/sglang").is_dir()):
        kind, errors = next(kind for kind in gpu_types_of_package() if silicon.folder_of(kind) == folder), []
        for model in measured_sizes(folder):
            for phase in ("decode", "prefill") if model.experts == 256 and model.row_width == 7168 else ("decode",):
                if kernel_table(kind, model, phase) is not None:
                    rows = skew_errors(kind, model, phase)
                    errors.append(rows[rows.held_out].assign(model=f"{model.name} {phase}"))
        rows = pd.concat(errors)
        size = rows.error.abs()
        of_model = size.groupby(rows.model).mean()
        print(
            f"{kind:>20}: mean {size.mean():.1%}, worst {size.max():.0%}, above 40 % {(size > 0.4).sum()} of {len(size)} (with "
            f"more than 16 tokens {((size > 0.4) & (rows.tokens > 16)).sum()}); worst of {len(of_model)} sizes and formats "
            f"{of_model.idxmax()} {of_model.max():.1%}"
        )


def gpu_types_of_package() -> list[str]:
    return [*silicon.MACHINES, *packaged_gpu_types()]


def measured_sizes(folder: str) -> Iterator[MoEModel]:
    """Models of all sizes and formats of a folder's tables."""
    columns, seen = [*SIZES, "moe_dtype"], set()
    for file in sorted((silicon._data_folder() / folder / "moe/sglang").glob("*/*moe_perf.parquet")):
        for row in pd.read_parquet(file, columns=columns).drop_duplicates().itertuples(index=False):
            if row not in seen:
                seen.add(row)
                dtype, bits = NUMBERS[row.moe_dtype]
                sizes = {"d_model": row.hidden_size, "d_ff": row.inter_size, "experts_per_token": row.topk}
                name = f"{row.hidden_size} x {row.inter_size}, {row.topk} of {row.num_experts}, {row.moe_dtype}"
                changed = {"name": name, "experts": row.num_experts, "dtype": dtype, "expert_bits": bits} | sizes
                yield DEEPSEEK.model_copy(update=changed)


def datasheet_beside_measurements() -> None:
    """The distance of the datasheet's operators from the measured ones, over all packaged models that have both."""
    print("\noperators by the datasheet against measured ones, all packaged models: relative error of their sum")
    for phase in ("decode", "prefill"):
        for kv_dtype in ("bf16", "fp8"):
            shape = {"sequences": 64, "context": 2000} if phase == "decode" else {"sequences": 1, "context": 4096}
            step = ServingStep(phase=phase, kv_dtype=kv_dtype, **shape)
            errors = [error for kind in ("H100", "H200", "B200") for error in roofline_errors(kind, step)]
            print(
                f"{phase:>10} {kv_dtype:>5}: mean {np.mean(errors):+.2f}, of its size {np.mean(np.abs(errors)):.2f}, worst "
                f"{max(errors, key=abs):+.2f} of {len(errors)}"
            )


def roofline_errors(gpu_type: str, step: ServingStep) -> Iterator[float]:
    for checkpoint, model in packaged_models().items():
        config = packaged_config(checkpoint)
        try:
            sizes = read_sizes(config)
            measured = seconds_of(AiconfiguratorOperators(config, model, sizes, gpu_type).operators(step))
        except InputError:
            continue
        yield seconds_of(RooflineOperators(model, sizes, gpu(gpu_type)).operators(step)) / measured - 1


if __name__ == "__main__":
    main()
