"""One prediction held against a measurement, and what many of them say together."""

from collections.abc import Iterable
from typing import NamedTuple


class Prediction(NamedTuple):
    """of: what is predicted, and how; setting: sizes, for people; measured, predicted: seconds; fitted: whether the measurement
    was used to fit what predicts it"""

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
    """Of predictions of one kind whose measurements were not fitted. mean, worst: of their errors without sign; points: how
    many there are; fitted: how many measurements were used to fit"""

    of: str
    hardware: str
    nodes: int
    mean: float
    worst: float
    points: int
    fitted: int


def summaries(predictions: Iterable[Prediction]) -> list[Summary]:
    """By what is predicted, on what and on how many nodes, in the order of their first appearance."""
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
