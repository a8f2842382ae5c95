"""Whether all layers of a load counted the same tokens."""

from collections.abc import Iterator

import numpy as np

from engine.finding import Finding
from engine.workload import ExpertLoad

TOLERANCE = 0.01
"""Part by which the layers of a load may differ: live counters are not read at one instant."""


def check_totals(loads: ExpertLoad) -> Iterator[Finding]:
    """Layers that counted fewer token copies than the median layer, or more; those without any are for `check_layers`."""
    total = loads.load.sum(axis=1)
    counted = total > 0
    if not counted.any():
        return
    usual = float(np.median(total[counted]))
    more, less = total > usual * (1 + TOLERANCE), counted & (total < usual * (1 - TOLERANCE))
    if more.any():
        worst = int(total.argmax())
        yield Finding(
            severity="warning",
            code="extra-passes",
            message=(
                f"Layer {worst} counted {total[worst]:,.0f} token copies, {total[worst] / usual:.2f}× the median layer's "
                f"{usual:,.0f}; every layer sees the same tokens, so others are counted with them, such as the passes of an "
                "MTP layer that drafts tokens: record without it, or count it apart."
            ),
            layers=tuple(np.flatnonzero(more).tolist()),
        )
    if less.any():
        worst = int(np.where(less, total, np.inf).argmin())
        yield Finding(
            severity="warning",
            code="layer-totals",
            message=(
                f"Layer {worst} counted {total[worst]:,.0f} token copies, the median layer {usual:,.0f}; every layer sees "
                "the same tokens, so some were dropped, or recorded over different steps: record all layers together."
            ),
            layers=tuple(np.flatnonzero(less).tolist()),
        )
    if not (more | less).any():
        apart = float(np.abs(total[counted] - usual).max()) / usual
        same = f", equal to within {apart:.2g} of it" if apart else ""
        yield Finding(
            severity="ok", code="layer-totals", message=f"Every layer counted {usual:,.0f} token copies{same}."
        )
