"""Experts placed so that those of a token are on few GPUs or nodes."""

from typing import Literal

import numpy as np

from engine.errors import IllegalError


def check_coactivation(
    gpu_of_expert: np.ndarray,
    experts: np.ndarray,
    source_gpu: np.ndarray,
    gpus: int,
    gpus_per_node: int | None = None,
    travel: Literal["gpu", "node"] = "gpu",
    cap: float | None = None,
) -> tuple[list[int], list[float]]:
    """Check that every GPU has equally many experts and no more load than the cap allows; (rows, imbalance), token by token.

    rows: of every layer, the other GPUs (nodes, for travel "node") that a token has experts on, summed over tokens; imbalance:
    tokens of the most loaded GPU of every layer / mean, 1 without tokens, at most `cap` where there is one.

    gpu_of_expert: int[layer, expert]; experts: int[layer, token, choice], -1 = none; source_gpu: int[token], -1 = from outside.
    GPU g is in node g // gpus_per_node; without `gpus_per_node` all GPUs are in one node.
    """
    if len(gpu_of_expert) != len(experts):
        raise IllegalError(f"{len(experts)} layers are recorded, {len(gpu_of_expert)} are placed")
    size = 1 if travel == "gpu" else gpus_per_node or gpus
    rows, imbalance = [], []
    for layer, place in enumerate(gpu_of_expert):
        held, load, sent = [0] * gpus, [0] * gpus, 0
        for expert, gpu in enumerate(place):
            if gpu != int(gpu) or not 0 <= gpu < gpus:
                raise IllegalError(f"layer {layer}, expert {expert}: there is no GPU {gpu}")
            held[int(gpu)] += 1
        for gpu in range(gpus):
            if held[gpu] * gpus != len(place):
                raise IllegalError(f"layer {layer}: GPU {gpu} has {held[gpu]} experts, wanted {len(place) / gpus:g}")
        for token, source in zip(experts[layer], source_gpu, strict=True):
            reached = set()
            for expert in token:
                if expert >= 0:
                    load[int(place[expert])] += 1
                    reached.add(int(place[expert]) // size)
            if source >= 0:
                reached.discard(int(source) // size)
            sent += len(reached)
        rows.append(sent)
        imbalance.append(max(load) * gpus / sum(load) if sum(load) else 1.0)
        if cap is not None and imbalance[-1] > cap * (1 + 1e-9):
            raise IllegalError(
                f"layer {layer}: the most loaded GPU has {imbalance[-1]:.6g} times the mean, above {cap:g}"
            )
    return rows, imbalance
