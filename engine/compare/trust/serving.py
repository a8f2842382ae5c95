"""Whole steps of serving against published figures of the same setting, and the experts of skewed loads against measured
ones."""

from collections.abc import Iterator
from typing import NamedTuple

from engine.catalogue import node_types
from engine.cluster import Cluster
from engine.compare.trust.collectives import skew_errors
from engine.compare.trust.prediction import Prediction
from engine.costs import Combined, Datasheet, DeepEP
from engine.formats import read_model, read_sizes
from engine.formats.packaged import packaged_config
from engine.plan import Plan, SendOrder, Travel
from engine.problem import make_problem
from engine.result import Provenance
from engine.serving.aiconfigurator import choose_operators
from engine.serving.step import ServingStep
from engine.simulate.serving import serve, with_fused_experts
from engine.systems.pieces import linear_placement
from engine.training import balanced_load

CHECKPOINT = "deepseek-ai/DeepSeek-V3"
WIDE_GPUS = ("H100", "H200", "B200", "GB200")
SKEWED = (
    (CHECKPOINT, "prefill", WIDE_GPUS),
    (CHECKPOINT, "decode", WIDE_GPUS),
    ("Qwen/Qwen3-30B-A3B", "decode", (*WIDE_GPUS, "A100-80", "L40S")),
)
TRAVELS = {"prefill": Travel(unit="node", dispatch="fp8", combine="bf16"), "decode": Travel(dispatch="fp8", combine="bf16")}
"""As DeepEP's normal and low-latency kernels send."""


class Published(NamedTuple):
    """A figure of somebody else's. rate: tokens/s per GPU; by: who says so, and where"""

    by: str
    node_type: str
    nodes: int
    step: ServingStep
    rate: float


SGLANG = "SGLang's team, lmsys.org/blog/2025-05-05-large-scale-ep"
PUBLISHED = (
    Published(
        SGLANG,
        "hgx-h100",
        4,
        ServingStep(phase="prefill", sequences=8, context=2000, overlap="two-batch", kv_dtype="fp8"),
        52_300 / 8,
    ),
    Published(
        SGLANG,
        "hgx-h100",
        9,
        ServingStep(phase="decode", sequences=256, context=2000, output=100, overlap="two-batch", kv_dtype="fp8"),
        22_300 / 8,
    ),
    Published(
        "AIConfigurator 0.12's own estimate",
        "hgx-h200",
        4,
        ServingStep(phase="decode", sequences=64, context=2000, output=1000, kv_dtype="fp8"),
        1589,
    ),
)


def serving() -> Iterator[Prediction]:
    """Steps of DeepSeek-V3 with evenly loaded experts; real loads are not, so that a server's step takes longer. Raises
    InputError when the tables are absent."""
    config = packaged_config(CHECKPOINT)
    model, sizes = read_model(config), read_sizes(config)
    for published in PUBLISHED:
        kind, step = node_types()[published.node_type], published.step
        nodes = tuple(kind.node(f"node {place}") for place in range(published.nodes))
        cluster = Cluster(name=published.by[:80], nodes=nodes, latency=kind.fabric_latency)
        travel = TRAVELS[step.phase]
        problem = make_problem(balanced_load(model), cluster, model, Combined(Datasheet(), DeepEP()), travel=travel)
        plan = Plan(
            name="linear",
            placement=linear_placement(problem),
            send_order=SendOrder(mode="concurrent"),
            travel=travel,
            provenance=Provenance(optimiser="linear"),
        )
        source, _ = choose_operators(config, model, sizes, cluster.gpus[0], step)
        figures = serve(plan, with_fused_experts(problem, plan, step), step, source, sizes).figures
        yield Prediction(
            f"DeepSeek-V3 {step.phase} step, {published.by}",
            kind.gpu,
            published.nodes,
            f"{step.sequences} sequences per GPU, {step.context} tokens in",
            step.tokens / published.rate,
            figures.seconds,
            False,
        )


def skewed_experts() -> Iterator[Prediction]:
    """Fused kernels on loads of power laws: the experts of models whose kernels follow DeepEP, and of one whose do not. The
    draws behind a row are not kept."""
    for checkpoint, phase, gpu_types in SKEWED:
        model = read_model(packaged_config(checkpoint))
        for gpu_type in gpu_types:
            for row in skew_errors(gpu_type, model, phase).itertuples():
                yield Prediction(
                    f"{checkpoint.split('/')[1]}'s experts in a {phase} step under power laws",
                    gpu_type,
                    1,
                    f"{row.held} experts, {row.tokens:,} tokens in all, exponent {row.exponent:g}",
                    row.measured,
                    row.ours,
                    not row.held_out,
                )
