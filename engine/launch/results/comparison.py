"""The measured timeline of a plan compared with the predicted one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from engine.timeline import HOST_KINDS, KINDS, Timeline
from engine.units import ratio, seconds


@dataclass(frozen=True)
class Comparison:
    """Seconds per kind, per layer and in total, of two timelines of the same plan.

    In a forward pass a layer's or kind's seconds run from its first start to its last end, so waiting for the slowest
    rank counts; of a scheduler and its copies, which come twice in a layer, they are those in which some rank is at it. In a
    training step, in which kinds overlap, they are those in which it runs, mean over the ranks.

    by_kind: columns kind, predicted, measured, ratio
    by_layer: layer, predicted, measured, ratio
    waiting, predicted_waiting: seconds in which nothing runs (barriers), measured and predicted; of a training step
        mean over the ranks
    """

    by_kind: pd.DataFrame
    by_layer: pd.DataFrame
    predicted: float
    measured: float
    waiting: float
    predicted_waiting: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted if self.predicted else float("inf")


def furthest(names: Sequence[str], predicted: Sequence[float | None], measured: Sequence[float | None]) -> str | None:
    """The part that is most seconds away from the predicted ones, in words; None if that is under a twentieth of all."""
    pairs = [(name, before or 0.0, after or 0.0) for name, before, after in zip(names, predicted, measured, strict=True)]
    name, before, after = max(pairs, key=lambda pair: abs(pair[2] - pair[1]), default=("", 0.0, 0.0))
    if abs(after - before) <= 0.05 * sum(after for _, _, after in pairs):
        return None
    factor = f", {ratio(after / before)}" if before else ""
    return f"{name} is furthest off, {seconds(after)} instead of {seconds(before)}{factor}"


def layer_in_words(layer: int) -> str:
    """`layer 3`; of a step the operators before, behind and besides the layers have the number -1."""
    return f"layer {layer}" if layer >= 0 else "outside the layers (embedding, head, all-reduce, update)"


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Compare a measured timeline with the predicted one."""
    seconds_of = _of_step if measured.labels is not None else _of_pass
    (kind_predicted, layer_predicted, predicted_waiting), (kind_measured, layer_measured, waiting) = map(
        seconds_of, (predicted, measured)
    )
    by_kind = _joined(kind_predicted, kind_measured)
    return Comparison(
        by_kind=by_kind.reindex([kind for kind in KINDS if kind in by_kind.index]).reset_index(names="kind"),
        by_layer=_joined(layer_predicted, layer_measured).reset_index(names="layer"),
        predicted=predicted.total,
        measured=measured.total,
        waiting=waiting,
        predicted_waiting=predicted_waiting,
    )


def _joined(predicted: pd.Series, measured: pd.Series) -> pd.DataFrame:
    """Both in one table. A step that only one of the two has takes no time in the other, and then there is no ratio."""
    table = pd.DataFrame({"predicted": predicted, "measured": measured}).fillna(0.0)
    return table.assign(ratio=table["measured"] / table["predicted"].where(table["predicted"] > 0))


def _of_pass(timeline: Timeline) -> tuple[pd.Series, pd.Series, float]:
    """Seconds by kind, by layer (indexed by these), and of waiting."""
    grouped = timeline.events.groupby(["model", "layer", "kind"], observed=True)
    spans = grouped.agg(start=("start", "min"), end=("end", "max")).reset_index()
    spans["seconds"] = spans["end"] - spans["start"]
    by_layer = pd.Series({layer: _seconds(own) for layer, own in spans.groupby("layer")}, dtype=float)
    by_kind = spans.groupby("kind", observed=True)["seconds"].sum()
    for kind in by_kind.index.intersection(HOST_KINDS):
        by_kind[kind] = sum(_seconds(own) for (_, _, which), own in grouped if which == kind)
    return by_kind, by_layer, timeline.total - _seconds(spans)


def _of_step(timeline: Timeline) -> tuple[pd.Series, pd.Series, float]:
    events = timeline.events
    seconds = (events["end"] - events["start"]) / len(timeline.resources)
    by_kind = seconds.groupby(events["kind"], observed=True).sum()
    return by_kind, seconds.groupby(events["layer"]).sum(), timeline.decomposition()["idle"]


def _seconds(spans: pd.DataFrame) -> float:
    """Seconds in which at least one step runs: those of two models overlap."""
    start, end = spans.sort_values("start")[["start", "end"]].to_numpy().T
    covered = np.maximum.accumulate(np.r_[-np.inf, end])[:-1]
    return float(np.maximum(end - np.maximum(start, covered), 0.0).sum())
