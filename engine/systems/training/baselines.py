"""The systems that the training systems are compared with: DeepSpeed, Tutel, FasterMoE, and a compiler that cuts nothing (RAF).

These are their policies on our simulated step, not their programs: kernels and communication take the same time in all.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import Field

from engine.goal import Goal
from engine.plan import Pipeline, Priority, SendOrder
from engine.problem import Problem
from engine.result import Provenance, Stop
from engine.simulate.training import simulate_step
from engine.systems.base import Draft, Note, Report, System
from engine.systems.options import Options
from engine.systems.pieces import linear_placement

Bucket = Annotated[
    float,
    Field(
        title="Bucket size (MB)",
        ge=0.001,
        le=1e6,
        description="gradients are fused until they reach so many MB before they are reduced (PyTorch's default: 25)",
    ),
]
TUTEL_DEGREES = (1, 2, 4, 8)


class BucketOptions(Options):
    bucket_mb: Bucket = 25.0


def fixed_degree(problem: Problem, degree: int, policy: str, bucket: float) -> Draft:
    """Every MoE layer cut in `degree` parts, forward and backward, experts in contiguous blocks."""
    layers = problem.workload.layers
    pipeline = None if degree == 1 else Pipeline(forward=(degree,) * layers, backward=(degree,) * layers)
    priority = Priority(policy=policy, bucket=bucket)
    return Draft(linear_placement(problem), SendOrder(mode="concurrent"), priority=priority, pipeline=pipeline)


def deepspeed(problem: Problem, options: BucketOptions, stop: Stop, report: Report) -> Draft:
    """All-to-alls wait for experts and experts for all-to-alls; gradients are reduced during the backward pass."""
    return fixed_degree(problem, 1, "fair", options.bucket_mb * 1e6)


def fastermoe(problem: Problem, options: BucketOptions, stop: Stop, report: Report) -> Draft:
    """Two parts, always (PipeMoE §VI)."""
    return fixed_degree(problem, 2, "fair", options.bucket_mb * 1e6)


def tutel(problem: Problem, options: BucketOptions, stop: Stop, report: Report) -> Draft:
    """The best of the degrees 1, 2, 4 and 8, the same for all layers, found by trying (Lancet §7)."""
    best, seconds = None, {}
    for step, degree in enumerate(TUTEL_DEGREES):
        draft = fixed_degree(problem, degree, "fair", options.bucket_mb * 1e6)
        seconds[degree] = simulate_step(draft.plan("trial", Provenance(optimiser="tutel")), problem).total
        best = draft if seconds[degree] == min(seconds.values()) else best
        report((step + 1) / len(TUTEL_DEGREES), f"tried degree {degree}", min(seconds.values()))
        if stop():
            break
    notes = {f"degree {degree}": Note(value, "s") for degree, value in seconds.items()}
    return replace(best, notes=notes, cancelled=stop())


def raf(problem: Problem, options: BucketOptions, stop: Stop, report: Report) -> Draft:
    """A compiler's order without Lancet's passes: nothing is cut, and one queue for all communication."""
    return fixed_degree(problem, 1, "fifo", options.bucket_mb * 1e6)


_baseline = partial(System, options=BucketOptions, goals=(Goal.TRAINING,), baseline=True)

SYSTEMS = (
    _baseline(
        name="deepspeed",
        title="DeepSpeed (no overlap)",
        summary="all-to-alls and experts take turns; gradients are reduced meanwhile",
        paper="Lancet §7, Lina §7",
        recipe=deepspeed,
        preselected=True,
        shown_beside=True,
    ),
    _baseline(
        name="tutel",
        title="Tutel (best of 1, 2, 4, 8)",
        summary="dispatch, experts and combine in a pipeline of one degree for all layers",
        paper="Lancet §7, PipeMoE §V",
        recipe=tutel,
        preselected=True,
        shown_beside=True,
    ),
    _baseline(
        name="fastermoe",
        title="FasterMoE (degree 2)",
        summary="dispatch, experts and combine in a pipeline of two parts",
        paper="PipeMoE §VI",
        recipe=fastermoe,
    ),
    _baseline(
        name="raf",
        title="RAF-like (no partition)",
        summary="a compiler's plain order, one queue for all communication",
        paper="Lancet §7",
        recipe=raf,
        preselected=True,
    ),
)
