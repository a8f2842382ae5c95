"""What a recording says at a glance: sizes, skew per layer, how well one layer's expert predicts the next one's."""

from dataclasses import dataclass

import numpy as np

from engine.formats.checks import Finding, check_recording
from engine.workload import RoutingTrace, Workload

KIND_NAMES = {"RoutingTrace": "routing log", "ExpertLoad": "expert loads", "TrafficMatrix": "traffic matrix"}


@dataclass(frozen=True, eq=False)
class Inspection:
    """skew: float64[layer], busiest expert / mean expert.

    predicted: float64[layer - 1] or None, the share of tokens whose next first-choice expert is the likeliest one after
    their present first choice (the affinity that ExFlow §III uses).
    """

    name: str
    kind: str
    layers: int
    experts: int
    k: int | None
    tokens: int | None
    skew: np.ndarray
    predicted: np.ndarray | None
    findings: list[Finding]

    def to_dict(self) -> dict:
        return {
            "name": self.name,
            "kind": self.kind,
            "layers": self.layers,
            "experts": self.experts,
            "k": self.k,
            "tokens": self.tokens,
            "max_over_mean": self.skew.tolist(),
            "foretold_share": None if self.predicted is None else self.predicted.tolist(),
            "checks": [{"level": finding.level, "text": finding.text} for finding in self.findings],
        }


def inspect(workload: Workload) -> Inspection:
    """Look a recording over."""
    mean = workload.load.mean(axis=1)
    skew = np.divide(workload.load.max(axis=1), mean, out=np.ones(len(mean)), where=mean > 0)
    return Inspection(
        name=workload.name,
        kind=KIND_NAMES[type(workload).__name__],
        layers=workload.layers,
        experts=workload.num_experts,
        k=workload.k,
        tokens=workload.tokens if isinstance(workload, RoutingTrace) else None,
        skew=skew,
        predicted=predicted_share(workload) if isinstance(workload, RoutingTrace) else None,
        findings=check_recording(workload),
    )


def predicted_share(trace: RoutingTrace) -> np.ndarray:
    """float64[layer - 1], see `Inspection`. Tokens without a choice in either layer do not count."""
    first = trace.experts[:, :, 0].astype(np.int64)
    experts = trace.num_experts
    shares = np.zeros(trace.layers - 1)
    for layer in range(trace.layers - 1):
        here, there = first[:, layer], first[:, layer + 1]
        known = (here >= 0) & (there >= 0)
        pairs = np.bincount(here[known] * experts + there[known], minlength=experts**2).reshape(experts, experts)
        shares[layer] = pairs.max(axis=1).sum() / max(known.sum(), 1)
    return shares
