"""Recordings as TensorRT-LLM writes them, with the bare libraries: json and safetensors."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.model import MoEModel

# MoE layers 1, 2, 3; the MTP layer would be 4
MODEL = MoEModel(name="small", layers=4, dense_layers=(0,), experts=4, experts_per_token=2, d_model=64, d_ff=64)

Counts = dict[str, list[int]]


def recording(
    folder: Path, ranks: list[Counts], experts: int = 4, tokens: list[dict[str, int]] | None = None, **meta: int
) -> Path:
    """Write a recording and return its folder.

    ranks: counts under "{iteration}_{layer}", one file a rank.
    tokens: numbers of the dispatch dump, one file a rank.
    meta: further fields of `meta_info.json`.
    """
    folder.mkdir(exist_ok=True)
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": experts, "num_experts_per_token": 2, **meta}))
    for rank, counts in enumerate(ranks):
        save_file({key: np.array(row, np.int64) for key, row in counts.items()}, folder / f"rank{rank}.safetensors")
    for rank, numbers in enumerate(tokens or ()):
        (folder / f"rank{rank}_numtokens.json").write_text(json.dumps(numbers))
    return folder
