"""Shared by benchmarks of size: DeepSeek-R1 on nodes of eight H100.

The recording is made by the studio's own generator (skew 0.6, affinity 0.3, seed 0): 16,384 tokens through 58 MoE layers of 256
experts, top-8. Nodes have links of 450 GB/s and ports of 50 GB/s.
"""

import io

import numpy as np

from engine.catalogue import gpu, model_presets
from engine.cluster import Cluster, Node
from engine.compare.synthetic import Recipe, synthetic

RECIPE = Recipe(tokens=16_384, skew=0.6, affinity=0.3)
MODEL = model_presets()["DeepSeek-R1"].model
ROOM = 4
"""Times the memory of an H100, so that the whole model fits eight of them; nothing else depends on it."""


def cluster_of(gpus: int) -> Cluster:
    card = gpu("H100", 50e9)
    card = card.model_copy(update={"memory": card.memory * ROOM})
    nodes = tuple(
        Node(name=f"node {index}", gpus=(card,) * 8, link_bandwidth=450e9, link_latency=2e-6)
        for index in range(gpus // 8)
    )
    return Cluster(name=f"{gpus} H100", nodes=nodes, latency=5e-6)


def routing_log() -> bytes:
    """The recording as a file (npz)."""
    trace = synthetic(MODEL, RECIPE)
    file = io.BytesIO()
    np.savez_compressed(file, experts=trace.experts, sequence=trace.sequence)
    return file.getvalue()
