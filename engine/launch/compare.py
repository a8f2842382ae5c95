"""Measured beside predicted."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from engine.timeline import COLUMNS, KINDS, NETWORK_KINDS, STREAMS, Timeline


@dataclass(frozen=True)
class Comparison:
    """Seconds per kind, per layer and in total, of two timelines of the same plan.

    by_kind: columns kind, predicted, measured, ratio; by_layer: layer, predicted, measured, ratio. A layer's or kind's
    seconds run from its first start to its last end, so waiting for the slowest rank counts.
    waiting: measured seconds between steps that belong to no step (barriers).
    """

    by_kind: pd.DataFrame
    by_layer: pd.DataFrame
    predicted: float
    measured: float
    waiting: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted if self.predicted else float("inf")


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Lay a measured timeline over the predicted one."""
    both = {"predicted": _spans(predicted), "measured": _spans(measured)}
    by_kind = pd.DataFrame(
        {name: spans.groupby("kind", observed=True)["seconds"].sum() for name, spans in both.items()}
    )
    by_layer = pd.DataFrame({name: spans.groupby("layer")["seconds"].sum() for name, spans in both.items()})
    for table in (by_kind, by_layer):
        # A step that only one of the two has takes no time in the other, and then there is no ratio.
        table[["predicted", "measured"]] = table[["predicted", "measured"]].fillna(0.0)
        table["ratio"] = table["measured"] / table["predicted"].where(table["predicted"] > 0)
    return Comparison(
        by_kind=by_kind.reindex([kind for kind in KINDS if kind in by_kind.index]).reset_index(names="kind"),
        by_layer=by_layer.reset_index(names="layer"),
        predicted=predicted.total,
        measured=measured.total,
        waiting=measured.total - float(both["measured"]["seconds"].sum()),
    )


def _spans(timeline: Timeline) -> pd.DataFrame:
    spans = timeline.events.groupby(["layer", "kind"], observed=True).agg(start=("start", "min"), end=("end", "max"))
    return (spans["end"] - spans["start"]).rename("seconds").reset_index()


def measured_timelines(folder: Path, ranks: int, plans: int, source: str) -> list[list[Timeline]]:
    """The timed passes of every plan of a launch, one timeline each, in order. A send is one event from its sender's post
    to its receiver's completion; a collective is one event on every rank. source: what they were measured on."""
    parts = []
    for rank in range(ranks):
        with np.load(folder / f"events-{rank}.npz", allow_pickle=False) as arrays:
            parts.append(pd.DataFrame({name: arrays[name] for name in arrays.files}).assign(seen_by=rank))
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
        frame = pd.DataFrame({
            "resource": one["src"], "start": one["start"], "end": one["end"], "layer": one["layer"],
            "model": one["model"], "peer": one["dst"], "bytes": one["bytes"],
            "kind": pd.Categorical(one["kind"], categories=list(KINDS)),
            "stream": pd.Categorical(np.where(network, "network", "compute"), categories=list(STREAMS)),
        })  # fmt: skip
        labels = tuple(one["label"]) if one["label"].any() else None
        timelines[plan].append(Timeline(frame[list(COLUMNS)], names, "measured", source, labels))
    return timelines
