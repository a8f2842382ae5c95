"""Recordings that tests of checks and remedies damage."""

from pathlib import Path

import numpy as np

from engine.formats import check_recording, read_workload
from engine.model import MoEModel
from engine.workload import ExpertLoad, Finding, RoutingTrace, Workload

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces" / "tiny-moe"

MODEL = MoEModel(name="small", layers=8, dense_layers=(0, 1), experts=16, experts_per_token=2, d_model=8, d_ff=8)


def sample(name: str = "beta-man") -> RoutingTrace:
    """12,288 tokens × 8 layers of a real top-2 gate over 16 experts."""
    return read_workload(SAMPLES / f"{name}.npz")


def random_trace(seed: int = 0, tokens: int = 200, layers: int = 6, experts: int = 16, k: int = 2, **columns) -> RoutingTrace:
    """Return a trace with k random different experts for each token."""
    scores = np.random.default_rng(seed).random((tokens, layers, experts))
    return RoutingTrace("random", np.argsort(scores, axis=2)[:, :, :k].astype(np.int16), experts, **columns)


def random_load(seed: int = 0, layers: int = 6, experts: int = 16, tokens: int = 4000) -> ExpertLoad:
    """Return loads of layers that all counted the same tokens."""
    counts = np.random.default_rng(seed).multinomial(tokens, np.full(experts, 1 / experts), size=layers)
    return ExpertLoad("random", counts.astype(np.float64), tuple(range(2, layers + 2)))


def finding_of(workload: Workload, code: str, model: MoEModel | None = None) -> Finding | None:
    """Return the first finding with this code, or None."""
    return next((finding for finding in check_recording(workload, model) if finding.code == code), None)


def doubts(workload: Workload, model: MoEModel | None = None) -> list[str]:
    """Codes of the findings that are not ok."""
    return [finding.code for finding in check_recording(workload, model) if finding.severity != "ok"]


def holds(workload: Workload, **parts: object) -> None:
    """Assert that a recording has these parts, arrays being compared as lists. codes: those of its reader's findings, in a dict
    with their severities."""
    findings = workload.origin.findings if workload.origin else ()
    for name, expected in parts.items():
        part = [finding.code for finding in findings] if name == "codes" else getattr(workload, name)
        if name == "codes" and isinstance(expected, dict):
            part = dict(zip(part, [finding.severity for finding in findings], strict=True))
        part, expected = (value.tolist() if isinstance(value, np.ndarray) else value for value in (part, expected))
        assert part == expected, f"{name} is {part}"
