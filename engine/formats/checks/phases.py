"""Prefill and decode in one recording: they run at other times, often on other GPUs, and like other experts."""

from collections.abc import Iterator

import numpy as np

from engine import units
from engine.finding import Finding
from engine.workload import DECODE, PREFILL, RoutingTrace

APART = 0.02
"""Distance between the loads of two phases, beyond what chance makes of so few tokens, from which planning on both misleads."""


def check_phases(trace: RoutingTrace) -> Iterator[Finding]:
    """How different the loads of the phases are, where the recording says which token is of which."""
    if trace.phase is None or len(np.unique(trace.phase)) < 2:
        return
    share = float((trace.phase == PREFILL).mean())
    distance, chance = distance_of_phases(trace)
    mixed = (
        f"Prefill ({units.share(share)} of the tokens) and decode are mixed. Their loads differ by "
        f"{units.share(distance)} of the token copies (total variation on average over layers; so few tokens differ by "
        f"{units.share(chance)} by chance alone)"
    )
    if distance - chance <= APART:
        yield Finding(severity="ok", code="phases-mixed", message=f"{mixed}: one plan may serve both.")
        return
    yield Finding(
        severity="warning",
        code="phases-mixed",
        message=f"{mixed}: plan for each alone. For instances that prefill, keep the prefill.",
        remedy="keep-prefill",
    )
    yield Finding(
        severity="warning",
        code="phases-mixed",
        message=f"For instances that decode, keep the decode ({units.share(1 - share)} of the tokens).",
        remedy="keep-decode",
    )


def distance_of_phases(trace: RoutingTrace) -> tuple[float, float]:
    """Total variation between the experts' shares of prefill and of decode on average over layers with both, and what it
    would be in the mean if both phases drew from the same shares."""
    rarer = trace.part(trace.phase == (PREFILL if 2 * (trace.phase == PREFILL).sum() < trace.tokens else DECODE))
    counts = np.stack([rarer.load, trace.load - rarer.load], axis=1)  # float64[layer, phase, expert]
    counts = counts[(counts.sum(axis=2) > 0).all(axis=1)]
    if not len(counts):
        return 0.0, 0.0
    total = counts.sum(axis=2, keepdims=True)
    shares = counts / total
    both = counts.sum(axis=1) / total.sum(axis=1)
    deviation = np.sqrt(both * (1 - both) * (1 / total).sum(axis=1))  # of the difference of two shares
    distance = np.abs(shares[:, 0] - shares[:, 1]).sum(axis=1) / 2
    chance = np.sqrt(2 / np.pi) * deviation.sum(axis=1) / 2
    return float(distance.mean()), float(chance.mean())
