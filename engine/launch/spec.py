"""What a launch tells its ranks: one JSON file and one array file in the run folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from engine.jobs.protocol import write_atomically
from engine.model import MoEModel
from engine.plan import Plan
from engine.schema import Frozen
from engine.training import TrainingStep
from engine.workload import RoutingTrace, Workload

SPEC, TRACE, REPORT, CALIBRATION = "spec.json", "trace.npz", "report.json", "calibration.json"
WORKER = "engine.launch.worker"
"""The only module that a launch starts."""

MAX_REPEATS, MAX_PLANS = 100, 8
POOL_STRIDE = 1009
"""Offset between the windows of two experts in the pool of weights: prime, so that no two experts see equal rows."""
PROGRESS = "progress "
"""What a line that reports progress on a rank's standard output begins with; JSON follows."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """What is replayed for one model. experts: int16[token, layer, k], -1 = none; source: int32[token], the rank that
    holds a token."""

    experts: np.ndarray
    source: np.ndarray


class LaunchSpec(Frozen):
    """What to run: plans for exactly `ranks` ranks, compared in one job, and a model in the dtype that will be used.

    model_b: of a second model that shares the ranks; step: a training step instead of a forward pass through the MoE layers
    bandwidth: bytes/s that every rank's link has in each direction, where that is known beforehand (a testbed)
    """

    plans: tuple[Plan, ...] = Field(min_length=1, max_length=MAX_PLANS)
    model: MoEModel
    model_b: MoEModel | None = None
    step: TrainingStep | None = None
    ranks: int = Field(ge=1, le=1024)
    backend: str = Field(pattern="^(gloo|nccl)$")
    repeats: int = Field(default=3, ge=1, le=MAX_REPEATS)
    bandwidth: tuple[float, ...] | None = None
    seed: int = 0


def write_spec(folder: Path, spec: LaunchSpec, workloads: Sequence[Workload]) -> None:
    """workloads: of the model and of a second one; what is no routing log has no tokens to tell."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for index, trace in enumerate(workloads):
        if isinstance(trace, RoutingTrace):
            arrays |= {f"experts_{index}": trace.experts, f"source_{index}": trace.rank_of_token(spec.ranks)}
    np.savez_compressed(folder / TRACE, **arrays)
    write_atomically(folder / SPEC, spec.to_json())


def read_spec(folder: Path) -> tuple[LaunchSpec, tuple[Tokens, ...]]:
    """What `write_spec` wrote."""
    with np.load(folder / TRACE, allow_pickle=False) as arrays:
        tokens = tuple(
            Tokens(arrays[f"experts_{index}"], arrays[f"source_{index}"]) for index in range(len(arrays.files) // 2)
        )
    return LaunchSpec.from_json((folder / SPEC).read_text(), SPEC), tokens
