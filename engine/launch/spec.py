"""What a launch tells its ranks: one JSON file and one array file in the run folder."""

from pathlib import Path

import numpy as np
from pydantic import Field

from engine.jobs.protocol import write_atomically
from engine.model import MoEModel
from engine.plan import Plan
from engine.schema import Frozen

SPEC, TRACE, REPORT, CALIBRATION = "spec.json", "trace.npz", "report.json", "calibration.json"
MAX_REPEATS = 100
POOL_STRIDE = 1009
"""Offset between the windows of two experts in the pool of weights: prime, so that no two experts see equal rows."""
PROGRESS = "progress "
"""What a line that reports progress on a rank's standard output begins with; JSON follows."""


class LaunchSpec(Frozen):
    """The forward pass to run: a plan for exactly `ranks` ranks, a model in the dtype that will be used."""

    plan: Plan
    model: MoEModel
    ranks: int = Field(ge=1, le=1024)
    backend: str = Field(pattern="^(gloo|nccl)$")
    repeats: int = Field(default=3, ge=1, le=MAX_REPEATS)
    seed: int = 0


def write_spec(folder: Path, spec: LaunchSpec, experts: np.ndarray, source_rank: np.ndarray) -> None:
    """experts: int16[token, layer, k]; source_rank: int32[token]."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / TRACE, experts=experts, source_rank=source_rank)
    write_atomically(folder / SPEC, spec.to_json())


def read_spec(folder: Path) -> tuple[LaunchSpec, np.ndarray, np.ndarray]:
    """(spec, experts int16[token, layer, k], source_rank int32[token])."""
    with np.load(folder / TRACE, allow_pickle=False) as arrays:
        return (
            LaunchSpec.from_json((folder / SPEC).read_text(), SPEC), arrays["experts"], arrays["source_rank"]
        )  # fmt: skip
