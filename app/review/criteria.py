"""The criteria of a verdict in words: every figure beside its threshold."""

from collections.abc import Sequence

import pandas as pd

from engine import units
from engine.verdict import Criterion, Thresholds


def as_text(criteria: Sequence[Criterion]) -> pd.DataFrame:
    """One row a criterion, with its purpose."""
    return pd.DataFrame(
        {
            "": ["✓ passed" if criterion.passed else "✗ not passed" for criterion in criteria],
            "Figure": [criterion.title for criterion in criteria],
            "Value": [_value(criterion) for criterion in criteria],
            "Threshold": [
                f"{'at least' if criterion.at_least else 'at most'} {_quantity(criterion.threshold, criterion.unit)}"
                for criterion in criteria
            ],
            "Criterion": [Thresholds.schemas()[criterion.name]["description"] for criterion in criteria],
        }
    )


def _value(criterion: Criterion) -> str:
    """Without replicas there is none that they add; a move may never pay."""
    if criterion.infinite:
        return "none" if criterion.at_least else "never"
    if criterion.value is None:
        return "unknown"
    value, threshold = (_quantity(number, criterion.unit) for number in (criterion.value, criterion.threshold))
    if value == threshold and criterion.unit == "share" and not criterion.passed:
        return f"{100 * criterion.value:.2f} %"  # a near miss must not read as if it were met
    return value


def _quantity(value: float, unit: str) -> str:
    if unit == "minutes":
        return minutes(value)
    return units.digits(value) if unit == "count" else units.share(value)


def minutes(value: float) -> str:
    """`12.3 min`; what is shorter than one in seconds."""
    return units.seconds(60 * value) if value < 1 else f"{units.digits(value)} min"
