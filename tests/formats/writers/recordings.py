"""Random recordings of every kind, with and without what they may have beside the counts."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from engine.workload import ExpertLoad, Finding, Origin, RoutingTrace, TrafficMatrix

seeds = st.integers(0, 2**32 - 1)

FINDINGS = (
    Finding(severity="warning", code="ring-order", message="Steps are „not“ in order.", layers=(0,), rows=(3, 9)),
)


@st.composite
def traces(draw, columns=("sequence", "source_rank", "phase", "model_layers")) -> RoutingTrace:
    """Up to 40 tokens whose choices may be padding."""
    rng = np.random.default_rng(draw(seeds))
    tokens, layers, k = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(k, 300))
    experts = rng.integers(-1, num_experts, (tokens, layers, k)).astype(np.int16)
    experts[0, 0, 0] = num_experts - 1  # what a reader takes for the number of experts
    parts = {
        "sequence": rng.integers(0, 5, tokens).astype(np.int32),
        "source_rank": rng.integers(0, 4, tokens).astype(np.int32),
        "phase": rng.integers(0, 2, tokens).astype(np.int8),
        "model_layers": tuple(np.cumsum(rng.integers(1, 4, layers)).tolist()),
    }
    kept = {name: parts[name] for name in columns if draw(st.booleans())}
    return RoutingTrace("trace", experts, num_experts, **kept)


@st.composite
def loads(draw, columns=("by_source", "by_step")) -> ExpertLoad:
    """Whole numbers or fractions; every layer has some tokens."""
    rng = np.random.default_rng(draw(seeds))
    layers, experts, parts = draw(st.integers(1, 4)), draw(st.integers(1, 30)), draw(st.integers(2, 4))
    counts = rng.integers(0, 10**6, (parts, layers, experts)).astype(np.float64)
    counts[..., 0] += 1
    if draw(st.booleans()):
        counts = counts / 8  # exact in binary: sums come out the same in any order
    numbers = tuple(np.cumsum(rng.integers(1, 4, layers)).tolist())
    kept = {name: counts for name in columns if draw(st.booleans())}
    return ExpertLoad("loads", counts.sum(axis=0), numbers, **kept)


@st.composite
def traffic(draw) -> TrafficMatrix:
    """Fractions of bytes between 2 to 5 ranks."""
    rng = np.random.default_rng(draw(seeds))
    layers, ranks = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    return TrafficMatrix("traffic", rng.random((layers, ranks, ranks)) * 1e9, float(rng.integers(1, 10**5)))


def with_findings(workload):
    """The workload as a reader that found something leaves it."""
    return replace(workload, origin=Origin(format="sglang-statistics", findings=FINDINGS))
