"""A recording at a glance: sizes, skew per layer, and the share of tokens that one layer's expert predicts in the next."""

from dataclasses import dataclass

import numpy as np

from engine.formats.checks import check_recording
from engine.model import MoEModel
from engine.timeline import Balance
from engine.workload import ExpertLoad, Finding, RoutingTrace, TrafficMatrix, Workload

KINDS = {
    RoutingTrace: ("routing", "routing log"),
    ExpertLoad: ("loads", "expert loads"),
    TrafficMatrix: ("traffic", "traffic matrix"),
}
"""The names of each kind of recording, for scripts and for people."""
MOST_CELLS = 2**18
"""Pairs of experts that are counted in a table whatever few tokens there are."""


@dataclass(frozen=True, eq=False)
class Inspection:
    """kind, title: names of such a recording for scripts and for people; format: of its file, None if it has none.

    skew: float64[layer], busiest expert / mean expert.

    predicted: float64[layer - 1] or None, the share of tokens that go on to the likeliest first-choice expert after
    their present first choice (the affinity that ExFlow §III uses).
    """

    name: str
    kind: str
    title: str
    format: str | None
    layers: int
    experts: int
    k: int | None
    tokens: int | None
    skew: np.ndarray
    predicted: np.ndarray | None
    findings: list[Finding]

    @property
    def balance(self) -> Balance:
        """The same over layers, between experts."""
        return Balance(tuple(self.skew.tolist()))

    def to_dict(self) -> dict:
        alike = ("name", "kind", "title", "format", "layers", "experts", "k", "tokens")
        return {name: getattr(self, name) for name in alike} | {
            "max_over_mean": self.skew.tolist(),
            "skew": self.balance.factors,
            "foretold_share": None if self.predicted is None else self.predicted.tolist(),
            "checks": [finding.model_dump(mode="json") for finding in self.findings],
        }


def inspect(workload: Workload, model: MoEModel | None = None) -> Inspection:
    """Look a recording over. model: of the recording, against which its layers and experts are checked"""
    kind, title = KINDS[type(workload)]
    return Inspection(
        name=workload.name,
        kind=kind,
        title=title,
        format=workload.origin.format if workload.origin else None,
        layers=workload.layers,
        experts=workload.num_experts,
        k=workload.k,
        tokens=workload.tokens if isinstance(workload, RoutingTrace) else None,
        skew=skew_of_layers(workload),
        predicted=predicted_share(workload) if isinstance(workload, RoutingTrace) else None,
        findings=check_recording(workload, model),
    )


def skew_of_layers(workload: Workload) -> np.ndarray:
    """float64[layer], see `Inspection`; 1 in a layer without tokens."""
    mean = workload.load.mean(axis=1)
    return np.divide(workload.load.max(axis=1), mean, out=np.ones(len(mean)), where=mean > 0)


def predicted_share(trace: RoutingTrace) -> np.ndarray:
    """float64[layer - 1], see `Inspection`. Tokens without a choice in either layer do not count."""
    first = trace.experts[:, :, 0].astype(np.int64)
    experts = trace.num_experts
    shares = np.zeros(trace.layers - 1)
    for layer in range(trace.layers - 1):
        here, there = first[:, layer], first[:, layer + 1]
        known = (here >= 0) & (there >= 0)
        shares[layer] = _foretold(here[known] * experts + there[known], experts) / max(known.sum(), 1)
    return shares


def _foretold(pairs: np.ndarray, experts: int) -> int:
    """The tokens that go on to the most frequent expert after their first. pairs: int64[token], first · experts + next"""
    if not len(pairs):
        return 0
    if experts**2 <= max(len(pairs), MOST_CELLS):
        return int(np.bincount(pairs, minlength=experts**2).reshape(experts, experts).max(axis=1).sum())
    seen, counts = np.unique(pairs, return_counts=True)  # a table of 4096 experts takes 134 MB a layer
    return int(np.maximum.reduceat(counts, np.flatnonzero(np.diff(seen // experts, prepend=-1))).sum())
