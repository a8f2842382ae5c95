"""A gate that is limited to some groups of experts: their nodes are all that a row must be sent to."""

from collections.abc import Iterator

import numpy as np

from engine.finding import Finding
from engine.workload import RoutingTrace

FEWEST_ROWS, MOST_GROUPS = 4096, 64
"""Choices of tokens in layers that show whether a gate is limited to groups, and how many groups there may be."""
ROWS_AT_ONCE = 1 << 16
"""What stays in the processor's cache."""


def check_groups(trace: RoutingTrace) -> Iterator[Finding]:
    """What the gate is limited to, where it is."""
    if limit := limited_groups(trace):
        groups, most = limit
        yield Finding(
            severity="ok",
            code="limited-groups",
            message=(
                f"No token's experts lie in more than {most} of {groups} groups of {trace.num_experts // groups}: the gate is "
                f"limited to groups. With a group to a node and one row per node, a token goes to at most {most} nodes."
            ),
        )


def limited_groups(trace: RoutingTrace) -> tuple[int, int] | None:
    """(groups, most groups of a token) of a gate that chooses groups of consecutive experts before experts, as DeepSeek-V3's
    does (§2.1.2); None where no token in a large enough recording shows such a limit."""
    rows = trace.experts.reshape(-1, trace.k)
    if len(rows) < FEWEST_ROWS:
        return None
    sample = rows[:: len(rows) // FEWEST_ROWS]
    # Without a limit some token has more than tokens that choose at random have in the mean.
    usual = {
        groups: groups * (1 - (1 - 1 / groups) ** trace.k)
        for groups in range(2, min(MOST_GROUPS, trace.num_experts - 1) + 1)
        if trace.num_experts % groups == 0
    }
    most = _most_groups(sample, trace.num_experts, list(usual))
    possible = [groups for groups in usual if most[groups] < usual[groups]]
    most = _most_groups(rows, trace.num_experts, possible)
    limited = [groups for groups in possible if most[groups] < usual[groups]]
    tightest = min(limited, key=lambda groups: (most[groups], -groups), default=None)
    return None if tightest is None else (tightest, most[tightest])


def _most_groups(rows: np.ndarray, experts: int, candidates: list[int]) -> dict[int, int]:
    """For each number of groups, in how many of them the experts of a row (int16[row, k], -1 = none) lie at most."""
    # One bit a group; the last entry, which -1 picks, has none.
    bits = {
        groups: np.append(np.uint64(1) << (np.arange(experts) * groups // experts).astype(np.uint64), np.uint64(0))
        for groups in candidates
    }
    most = dict.fromkeys(candidates, 0)
    for start in range(0, len(rows) if candidates else 0, ROWS_AT_ONCE):
        choices = np.ascontiguousarray(rows[start : start + ROWS_AT_ONCE].T)
        for groups in candidates:
            touched = bits[groups][choices[0]]
            for choice in choices[1:]:
                touched |= bits[groups][choice]
            most[groups] = max(most[groups], int(np.bitwise_count(touched).max()))
    return most
