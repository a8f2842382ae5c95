"""Checks of sums: layers of a load that counted other tokens than the rest, ids of physical slots in place of experts (engines
that run with redundant experts record those), and layers and ranks of a traffic matrix that move nothing.
"""

from collections.abc import Iterator

import numpy as np

from engine import units
from engine.formats.checks.copies import name_of
from engine.formats.checks.layers import DROP
from engine.formats.source import error, ok, warning
from engine.model import MoEModel
from engine.workload import ExpertLoad, Finding, RoutingTrace, TrafficMatrix

TOLERANCE = 0.01
"""Share by which the layers of a load may differ: live counters are not read at one instant."""


def check_totals(loads: ExpertLoad) -> Iterator[Finding]:
    """Findings on layers that counted fewer token copies than the median layer, or more; `check_layers` finds empty ones."""
    total = loads.load.sum(axis=1)
    counted = total > 0
    if not counted.any():
        return
    if np.allclose(total[counted], 1, atol=1e-3) and (loads.load < 1).any():
        yield warning(
            "layer-totals",
            "Every layer adds up to 1: these are shares, not counts. The share of each expert is right; the number of tokens "
            "is not known: save the counts.",
        )
        return
    usual = float(np.quantile(total[counted], 0.5, method="lower"))
    more, less = total > usual * (1 + TOLERANCE), counted & (total < usual * (1 - TOLERANCE))
    if more.any():
        worst = int(total.argmax())
        yield warning(
            "extra-passes",
            f"Layer {worst} counted {total[worst]:,.0f} token copies, {total[worst] / usual:.2f}× the median layer's "
            f"{usual:,.0f}; every layer sees the same tokens, so others are counted with them, such as the passes of an "
            "MTP layer that drafts tokens: record without it, or count it apart.",
            layers=tuple(np.flatnonzero(more).tolist()),
        )
    if less.any():
        worst = int(np.where(less, total, np.inf).argmin())
        yield warning(
            "layer-totals",
            f"Layer {worst} counted {total[worst]:,.0f} token copies, the median layer {usual:,.0f}; every layer sees "
            "the same tokens, so some were dropped, or recorded over different steps: record all layers together.",
            layers=tuple(np.flatnonzero(less).tolist()),
        )
    if not (more | less).any():
        apart = float(np.abs(total[counted] - usual).max()) / usual
        same = f", equal to within {apart:.2g} of it" if apart else ""
        yield ok("layer-totals", f"Every layer counted {usual:,.0f} token copies{same}.")


def of_one_rank(workload: RoutingTrace | ExpertLoad, model: MoEModel | None) -> Finding | None:
    """The finding on loads of as many experts as one of several ranks holds, after which nothing else can be said; None for
    others."""
    if model is None or not isinstance(workload, ExpertLoad) or not 1 < workload.num_experts < model.experts:
        return None
    ranks, rest = divmod(model.experts, workload.num_experts)
    said = (
        f"The recording counts {workload.num_experts} experts per layer, {model.name} has {model.experts}: as many as one of "
    )
    said += f"{ranks} expert-parallel ranks holds. Give the files of all ranks together."
    return None if rest else error("experts-of-one-rank", said)


def check_slots(workload: RoutingTrace | ExpertLoad, model: MoEModel | None) -> Iterator[Finding]:
    """The finding on a recording with more experts than the model has."""
    if model is None or workload.num_experts <= model.experts:
        return
    spare = workload.num_experts - model.experts
    share = workload.load[:, model.experts :].sum() / max(workload.load.sum(), 1)
    yield error(
        "slot-ids",
        f"The recording counts {workload.num_experts} experts per layer, {model.name} has {model.experts}: these "
        f"are physical slots, {spare} of them redundant, as engines with a load balancer count them ({units.share(share)} "
        f"of the token copies went to ids from {model.experts} on). Loads of slots look sound but are not those "
        "of experts: fold them with the plan that ran.",
        remedy="fold-slots",
    )


def silent_layers(matrix: TrafficMatrix) -> np.ndarray:
    """The layers that move no bytes between ranks, int64[...]."""
    return np.flatnonzero(~_remote(matrix).any(axis=(1, 2)))


def _remote(matrix: TrafficMatrix) -> np.ndarray:
    """The bytes that leave their rank, float64[layer, src, dst]."""
    return np.where(np.eye(matrix.bytes.shape[1], dtype=bool), 0.0, matrix.bytes)


def check_traffic(matrix: TrafficMatrix) -> Iterator[Finding]:
    """Findings on layers and ranks that send or receive nothing."""
    ranks = matrix.bytes.shape[1]
    silent = silent_layers(matrix)
    if silent.size:
        text = f"{name_of('layer', silent)} moves no bytes between ranks; record it again or drop it."
        yield error("silent-layers", text, layers=tuple(silent.tolist()), remedy=DROP if len(silent) < matrix.layers else None)
    remote = _remote(matrix)
    for axis, does in ((2, "sends"), (1, "receives")):
        if (idle := np.flatnonzero(remote.sum(axis=(0, axis)) == 0)).size:
            yield warning(
                "silent-ranks", f"{name_of('rank', idle)} {does} nothing in any layer; check that its file was recorded."
            )
    if not silent.size:
        yield ok("traffic", f"Traffic between {ranks} ranks in {matrix.layers} layer{'s' * (matrix.layers > 1)}.")
