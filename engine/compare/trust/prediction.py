"""One prediction held against a measurement, and a summary of many."""

from collections.abc import Iterable
from typing import NamedTuple


class Prediction(NamedTuple):
    """A prediction and its measurement.

    of: the predicted quantity and its source, in words
    setting: sizes, for people
    measured, predicted: seconds
    fitted: True if the measurement was used to fit its prediction
    """

    of: str
    hardware: str
    nodes: int
    setting: str
    measured: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """By how much of the measured time the predicted one is longer (shorter: negative)."""
        return self.predicted / self.measured - 1


class Summary(NamedTuple):
    """The errors of predictions of one kind on measurements that were not fitted.

    mean, worst: of the errors without sign
    points: their number
    fitted: number of measurements that were used to fit
    """

    of: str
    hardware: str
    nodes: int
    mean: float
    worst: float
    points: int
    fitted: int


def summaries(predictions: Iterable[Prediction]) -> list[Summary]:
    """Summaries by predicted quantity, hardware and number of nodes, in the order of their first appearance."""
    groups: dict[tuple[str, str, int], list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault((prediction.of, prediction.hardware, prediction.nodes), []).append(prediction)
    rows = []
    for key, group in groups.items():
        errors = [abs(prediction.error) for prediction in group if not prediction.fitted]
        if errors:
            mean = sum(errors) / len(errors)
            rows.append(Summary(*key, mean, max(errors), len(errors), len(group) - len(errors)))
    return rows
