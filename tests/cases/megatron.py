"""Traces as Megatron-Core's tracer writes them: one JSON object a line, by the bare library."""

import json
from pathlib import Path

import numpy as np

from engine.model import MoEModel

MODEL = MoEModel(name="small", layers=4, experts=8, experts_per_token=2, d_model=64, d_ff=64)
AFTER_DENSE = MODEL.model_copy(update={"name": "after a dense layer", "layers": 5, "dense_layers": (0,)})


def record(step: int, layer: int, rank: int, chosen: list[list[int]], **further: object) -> dict:
    """Return one line. chosen: int[token][choice] experts; further: `block`, `mtp_idx` and other fields"""
    about = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank}
    return {**about, "num_tokens": len(chosen), "topk": 2, **further, "top_indices": chosen}


def trace(folder: Path, *ranks: list[dict]) -> Path:
    """Write the records of every rank to a file of its own and return the folder."""
    folder.mkdir(exist_ok=True)
    for records in ranks:
        path = folder / f"router_trace_rank{records[0]['rank']}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in records))
    return folder


def choices(seed: int, tokens: int) -> list[list[int]]:
    """Draw two different experts of eight for every token."""
    rng = np.random.default_rng(seed)
    return [rng.choice(8, 2, replace=False).tolist() for _ in range(tokens)]


def run(layers: list[int], rank: int, seed: int, steps: int = 2, tokens: int = 40, micro_batches: int = 1) -> list[dict]:
    """Records of these layers by one rank; every seed stands for other choices."""
    return [
        record(step, layer, rank, choices(1000 * seed + 100 * step + 10 * batch + layer, tokens))
        for step in range(steps)
        for batch in range(micro_batches)
        for layer in layers
    ]


def codes(workload: object) -> dict[str, str]:
    """Severity of the reader's findings by their code."""
    return {finding.code: finding.severity for finding in workload.origin.findings}
