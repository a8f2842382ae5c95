"""Samples for tests of serving: DeepSeek-V3's sizes, a small model with heads, and the steps they take."""

from engine.catalogue import node_types
from engine.cluster import Cluster
from engine.model import MoEModel
from engine.serving.sizes import TransformerSizes
from engine.serving.step import ServingStep

DEEPSEEK = MoEModel(
    name="DeepSeek-V3",
    layers=61,
    dense_layers=(0, 1, 2),
    experts=256,
    experts_per_token=8,
    d_model=7168,
    d_ff=2048,
    shared_experts=1,
    dtype="fp8",
)
DEEPSEEK_SIZES = TransformerSizes(
    heads=128,
    kv_heads=128,
    head_size=128,
    value_size=128,
    kv_rank=512,
    q_rank=1536,
    rope_size=64,
    dense_d_ff=18432,
    vocabulary=129280,
)
QWEN = MoEModel(name="Qwen3-30B-A3B", layers=48, experts=128, experts_per_token=8, d_model=2048, d_ff=768)
QWEN_SIZES = TransformerSizes(heads=32, kv_heads=4, head_size=128, value_size=128, dense_d_ff=6144, vocabulary=151936)
DECODE = ServingStep(phase="decode", sequences=64, context=2000, output=1000, kv_dtype="fp8")
PREFILL = ServingStep(phase="prefill", sequences=2, context=4096, kv_dtype="fp8")


def h200(nodes: int) -> Cluster:
    kind = node_types()["hgx-h200"]
    drawn = tuple(kind.node(f"node {index}") for index in range(nodes))
    return Cluster(name=f"{8 * nodes} H200", nodes=drawn, latency=kind.fabric_latency)
