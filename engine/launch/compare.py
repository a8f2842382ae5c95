"""Measured beside predicted."""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from engine.errors import InputError
from engine.timeline import COLUMNS, KINDS, NETWORK_KINDS, STREAMS, Timeline


@dataclass(frozen=True)
class Comparison:
    """Seconds per kind, per layer and in total, of two timelines of the same plan.

    by_kind: columns kind, predicted, measured, ratio; by_layer: layer, predicted, measured, ratio. Of a forward pass a
    layer's or kind's seconds run from its first start to its last end, so waiting for the slowest rank counts; of a
    training step, where kinds overlap, they are those in which it runs, mean over the ranks.
    waiting, predicted_waiting: seconds in which nothing runs (barriers), measured and predicted; of a training step mean
    over the ranks.
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


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Lay a measured timeline over the predicted one."""
    of = _of_step if measured.labels is not None else _of_pass
    foretold, found = of(predicted), of(measured)
    by_kind = _beside(foretold.by_kind, found.by_kind)
    return Comparison(
        by_kind=by_kind.reindex([kind for kind in KINDS if kind in by_kind.index]).reset_index(names="kind"),
        by_layer=_beside(foretold.by_layer, found.by_layer).reset_index(names="layer"),
        predicted=predicted.total,
        measured=measured.total,
        waiting=found.waiting,
        predicted_waiting=foretold.waiting,
    )


def _beside(predicted: pd.Series, measured: pd.Series) -> pd.DataFrame:
    """A step that only one of the two has takes no time in the other, and then there is no ratio."""
    table = pd.DataFrame({"predicted": predicted, "measured": measured}).fillna(0.0)
    return table.assign(ratio=table["measured"] / table["predicted"].where(table["predicted"] > 0))


@dataclass(frozen=True)
class _Seconds:
    """Of one timeline. by_kind, by_layer: indexed by these."""

    by_kind: pd.Series
    by_layer: pd.Series
    waiting: float


def _of_pass(timeline: Timeline) -> _Seconds:
    spans = _spans(timeline)
    by_layer = pd.Series({layer: _seconds(own) for layer, own in spans.groupby("layer")}, dtype=float)
    by_kind = spans.groupby("kind", observed=True)["seconds"].sum()
    return _Seconds(by_kind, by_layer, timeline.total - _seconds(spans))


def _of_step(timeline: Timeline) -> _Seconds:
    events, lanes = timeline.events, len(timeline.resources)
    seconds = (events["end"] - events["start"]) / lanes
    by_kind = seconds.groupby(events["kind"], observed=True).sum()
    return _Seconds(by_kind, seconds.groupby(events["layer"]).sum(), timeline.decomposition()["idle"])


def _spans(timeline: Timeline) -> pd.DataFrame:
    spans = timeline.events.groupby(["model", "layer", "kind"], observed=True).agg(
        start=("start", "min"), end=("end", "max")
    )
    return spans.assign(seconds=spans["end"] - spans["start"]).reset_index()


def _seconds(spans: pd.DataFrame) -> float:
    """How long at least one step runs: those of two models overlap."""
    start, end = spans.sort_values("start")[["start", "end"]].to_numpy().T
    covered = np.maximum.accumulate(np.r_[-np.inf, end])[:-1]
    return float(np.maximum(end - np.maximum(start, covered), 0.0).sum())


def measured_timelines(folder: Path, ranks: int, plans: int, source: str) -> list[list[Timeline]]:
    """The timed passes of every plan of a launch, one timeline each, in order. A send is one event from its sender's post
    to its receiver's completion; a collective is one event on every rank. source: what they were measured on. Raises
    InputError when a rank's file is missing or torn."""
    parts = [_read_events(folder / f"events-{rank}.npz").assign(seen_by=rank) for rank in range(ranks)]
    events = pd.concat(parts, ignore_index=True)
    sends = events["dst"] >= 0
    key = ["plan", "number", "layer", "kind", "model", "phase", "src", "dst", "row", "bytes", "label"]
    by_sender = events[sends & (events["seen_by"] == events["src"])].drop(columns="end")
    by_receiver = events[sends & (events["seen_by"] == events["dst"])][[*key, "end"]]
    joined = pd.concat([events[~sends], by_sender.merge(by_receiver, on=key)], ignore_index=True)
    names = tuple(f"rank {rank}" for rank in range(ranks))
    timelines: list[list[Timeline]] = [[] for _ in range(plans)]
    for (plan, _), one in joined.groupby(["plan", "number"]):
        one = one.assign(end=one["end"] - one["start"].min(), start=one["start"] - one["start"].min())
        one = one.sort_values("start", ignore_index=True)
        network = one["kind"].isin(NETWORK_KINDS)
        frame = pd.DataFrame(
            {
                "resource": one["src"],
                "start": one["start"],
                "end": one["end"],
                "layer": one["layer"],
                "model": one["model"],
                "peer": one["dst"],
                "bytes": one["bytes"],
                "kind": pd.Categorical(one["kind"], categories=list(KINDS)),
                "stream": pd.Categorical(np.where(network, "network", "compute"), categories=list(STREAMS)),
            }
        )
        labels = tuple(one["label"]) if one["label"].any() else None
        timelines[plan].append(Timeline(frame[list(COLUMNS)], names, "measured", source, labels))
    return timelines


def _read_events(path: Path) -> pd.DataFrame:
    """A rank's events, as its recorder saved them."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return pd.DataFrame({name: arrays[name] for name in arrays.files})
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> InputError:
    """What to say of a file that a rank should have left whole."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else "it is torn"
    return InputError(f"the measurements in {path} cannot be read ({why}); launch again")
