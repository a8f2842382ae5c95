"""One NumPy array, `.npy`: int16[token, layer, k] of routing, float64[layer, src, dst] of traffic."""

from pathlib import Path

import numpy as np

from engine.formats import traffic
from engine.formats.writers.writer import Writer, unsaid
from engine.model import MoEModel
from engine.workload import RoutingTrace, TrafficMatrix


def write_npy(workload: RoutingTrace | TrafficMatrix, path: Path, _model: MoEModel | None = None) -> tuple[str, ...]:
    """Cannot carry: how many experts there are (it reads back as the largest id + 1, or the open model's), sequences, source
    ranks, phases, the numbers of layers; of traffic the bytes of a token copy."""
    if isinstance(workload, TrafficMatrix):
        traffic.write_npy(workload, path)
        return ("how many bytes a token copy is",)
    with path.open("wb") as file:
        np.save(file, workload.experts, allow_pickle=False)
    fewer = () if workload.experts.max() + 1 == workload.num_experts else ("how many experts a layer has",)
    return fewer + unsaid(
        workload,
        sequence="which sequence a token belongs to",
        source_rank="which rank a token came from",
        phase="which tokens were prefill and which decode",
        model_layers="which layers of the model were recorded",
    )


WRITERS = (Writer("npy", ".npy", "a NumPy array", (RoutingTrace, TrafficMatrix), write_npy),)
