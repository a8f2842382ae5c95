"""The number of spare slots that is advised: the knee of the curve of `redundancy`, as far as noise lets it be seen."""

from collections.abc import Sequence
from typing import Literal

from engine.schema import Frozen
from engine.studies.judge import CONFIDENCE, deviation, interval
from engine.studies.redundancy import RedundancyPoint
from engine.units import share, signed

KNEE_SHARE = 0.9
LEAST_GAIN = 0.01
ROUND_OFF = 1e-9

Rule = Literal["enough", "as good", "too little", "noise"]


class Knee(Frozen):
    """slots: of a layer, that are advised; rule: why, and reason: the same in words, without a full stop.

    enough: the fewest that bring `KNEE_SHARE` of the most that any number brings
    as good: the fewest whose gain cannot be told from that
    too little: the fewest of all, for no number gains `LEAST_GAIN`
    noise: the fewest of all, for the interval of the most that any number brings includes nought
    """

    slots: int
    rule: Rule
    reason: str


def knee(points: Sequence[RedundancyPoint]) -> Knee:
    """More slots are advised only where the recordings tell that they gain more.

    points: as `redundancy` makes them, fewest slots first, at least one. Two of them are told apart by the interval of their
    difference in the same draws, which is narrower than those of their gains; that the most is picked from several is not
    allowed for.
    """
    best = max(points, key=lambda point: point.gain)
    low, high = best.interval
    if best.gain < LEAST_GAIN:
        return Knee(
            slots=points[0].slots,
            rule="too little",
            reason=f"no number of spare slots gains as much as {share(LEAST_GAIN)}",
        )
    most = f"{signed(best.gain)} with {best.slots} slots, {share(CONFIDENCE)} interval {signed(low)} to {signed(high)}"
    if low <= 0:
        return Knee(
            slots=points[0].slots,
            rule="noise",
            reason=f"the most that any number of spare slots brings may as well be nothing ({most})",
        )
    point, rule = next((point, rule) for point in points if (rule := _reaches(point, best)))
    which = {"enough": "the fewest that bring", "as good": "the fewest whose gain cannot be told from"}[rule]
    return Knee(
        slots=point.slots, rule=rule, reason=f"{which} {share(KNEE_SHARE)} of the most that any number brings ({most})"
    )


def _reaches(point: RedundancyPoint, best: RedundancyPoint) -> Rule | None:
    """Whether a point brings `KNEE_SHARE` of the most, or may do so as far as the draws can say."""
    missing = KNEE_SHARE * best.gain - point.gain
    if missing <= ROUND_OFF * best.gain:
        return "enough"
    least, _ = interval(missing, deviation(KNEE_SHARE * best.draws - point.draws))
    return "as good" if least <= 0 else None
