"""The timeline: what ran where and when. One type for predicted and for measured runs, so that they can be compared."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

STREAMS = ("compute", "network")
COMPUTE_KINDS = ("gate", "ffn", "aggregate")
NETWORK_KINDS = ("dispatch", "combine", "all_gather")
KINDS = COMPUTE_KINDS + NETWORK_KINDS

COLUMNS = ("resource", "stream", "start", "end", "kind", "layer", "model", "peer", "bytes")


@dataclass(frozen=True, eq=False)
class Timeline:
    """Events of one run.

    events: one row an event, columns `resource` (int, GPU), `stream` (one of STREAMS), `start`, `end` (seconds),
        `kind` (one of KINDS), `layer` (MoE layer), `model` (0, or 1 for the second of two colocated models), `peer` (the
        GPU a send goes to, -1 for computation), `bytes`
    resources: lane name of every GPU
    source: whether the times were simulated or measured
    cost_source: which cost model (or machine) they come from
    """

    events: pd.DataFrame
    resources: tuple[str, ...]
    source: Literal["simulated", "measured"]
    cost_source: str

    def to_dict(self) -> dict:
        """Plain JSON: the events as columns, times in seconds."""
        columns = {name: self.events[name].tolist() for name in COLUMNS}
        return {
            "resources": list(self.resources), "source": self.source, "cost_source": self.cost_source, "events": columns
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict) -> "Timeline":
        """The timeline that `to_dict` described."""
        events = pd.DataFrame({name: data["events"][name] for name in COLUMNS})
        events["stream"] = pd.Categorical(events["stream"], categories=list(STREAMS))
        events["kind"] = pd.Categorical(events["kind"], categories=list(KINDS))
        return cls(events, tuple(data["resources"]), data["source"], data["cost_source"])

    @property
    def total(self) -> float:
        """Seconds from 0 to the last end."""
        return float(self.events["end"].max()) if len(self.events) else 0.0

    def busy(self, stream: str) -> np.ndarray:
        """float64[gpu]: seconds in which a GPU's stream has at least one event (a send occupies both its ends)."""
        events = self.events[self.events["stream"] == stream]
        ends = [events[["resource", "start", "end"]]]
        if stream == "network":
            ends.append(events[["peer", "start", "end"]].rename(columns={"peer": "resource"}))
        every = pd.concat(ends)
        return np.array([_covered(every[every["resource"] == gpu]) for gpu in range(len(self.resources))])

    @property
    def utilisation(self) -> float:
        """Compute time / total, mean over GPUs (Aurora §8.1)."""
        return float(self.busy("compute").mean() / self.total) if self.total else 0.0

    def seconds_of_kind(self) -> dict[str, float]:
        """Seconds of the critical path per kind: from the first start to the last end of a kind in a layer, summed."""
        spans = self.events.groupby(["model", "layer", "kind"], observed=True).agg(
            start=("start", "min"), end=("end", "max")
        )
        totals = (spans["end"] - spans["start"]).groupby("kind", observed=True).sum()
        return {kind: float(totals.get(kind, 0.0)) for kind in KINDS}

    def exposed_communication(self) -> float:
        """Seconds in which some GPU's network is busy and no GPU computes."""
        network = _union(self.events[self.events["stream"] == "network"])
        both = _union(self.events)
        compute = _union(self.events[self.events["stream"] == "compute"])
        return _length(both) - _length(compute) if len(network) else 0.0

    @property
    def overlap(self) -> float:
        """Share of the network's busy time that is hidden under computation."""
        network = _length(_union(self.events[self.events["stream"] == "network"]))
        return 1 - self.exposed_communication() / network if network else 0.0


def _union(events: pd.DataFrame) -> np.ndarray:
    """float64[interval, 2]: the union of the events' intervals."""
    if not len(events):
        return np.empty((0, 2))
    spans = events[["start", "end"]].to_numpy()
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    latest = np.maximum.accumulate(spans[:, 1])
    first = np.r_[True, spans[1:, 0] > latest[:-1]]
    last = np.r_[first[1:], True]
    return np.column_stack([spans[first, 0], latest[last]])


def _length(intervals: np.ndarray) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def _covered(events: pd.DataFrame) -> float:
    return _length(_union(events))


def balancedness(load: np.ndarray) -> np.ndarray:
    """Mean / max over the last axis (EPLB, vLLM, SGLang); 1 for a layer without load. load: float64[..., gpu]."""
    most = load.max(axis=-1)
    return np.where(most > 0, load.mean(axis=-1) / np.where(most > 0, most, 1), 1.0)
