"""The timeline: what ran where and when. One type for predicted and for measured runs, so that they can be compared."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

STREAMS = ("compute", "network")
COMPUTE_KINDS = ("dense", "gate", "ffn", "aggregate", "dx", "dw")
NETWORK_KINDS = ("dispatch", "combine", "all_gather", "all_reduce")
KINDS = COMPUTE_KINDS + NETWORK_KINDS
INFERENCE_KINDS = ("gate", "ffn", "aggregate", "dispatch", "combine", "all_gather")
"""The kinds of a forward pass through the MoE layers alone."""

COLUMNS = ("resource", "stream", "start", "end", "kind", "layer", "model", "peer", "bytes")


@dataclass(frozen=True, eq=False)
class Timeline:
    """Events of one run.

    events: one row an event, columns `resource` (int, GPU), `stream` (one of STREAMS), `start`, `end` (seconds),
        `kind` (one of KINDS), `layer` (MoE layer), `model` (0, or 1 for the second of two colocated models), `peer` (the
        GPU a send goes to, -1 for computation), `bytes`
    resources: lane name of every GPU, or of every group of GPUs that do the same at the same time
    source: whether the times were simulated or measured
    cost_source: which cost model (or machine) they come from
    labels: for a training step, the operator (and part) of every event, by the row of `events`
    """

    events: pd.DataFrame
    resources: tuple[str, ...]
    source: Literal["simulated", "measured"]
    cost_source: str
    labels: tuple[str, ...] | None = None

    def to_dict(self) -> dict:
        """Plain JSON: the events as columns, times in seconds."""
        columns = {name: self.events[name].tolist() for name in COLUMNS}
        document = {
            "resources": list(self.resources),
            "source": self.source,
            "cost_source": self.cost_source,
            "events": columns,
        }
        return document if self.labels is None else document | {"labels": list(self.labels)}

    @classmethod
    def from_dict(cls, data: dict) -> "Timeline":
        """The timeline that `to_dict` described."""
        events = pd.DataFrame({name: data["events"][name] for name in COLUMNS})
        events["stream"] = pd.Categorical(events["stream"], categories=list(STREAMS))
        events["kind"] = pd.Categorical(events["kind"], categories=list(KINDS))
        labels = tuple(data["labels"]) if "labels" in data else None
        return cls(events, tuple(data["resources"]), data["source"], data["cost_source"], labels)

    @property
    def total(self) -> float:
        """Seconds from 0 to the last end."""
        return float(self.events["end"].max()) if len(self.events) else 0.0

    def _spans(self) -> np.ndarray:
        """float64[event, 2]: the start and the end of every event."""
        return self.events[["start", "end"]].to_numpy(np.float64)

    def _on(self, stream: str) -> np.ndarray:
        """bool[event]: which events are of a stream."""
        return (self.events["stream"] == stream).to_numpy()

    def busy(self, stream: str) -> np.ndarray:
        """float64[gpu]: seconds in which a GPU's stream has at least one event (a send occupies both its ends)."""
        on = self._on(stream)
        spans, lanes = self._spans()[on], self.events["resource"].to_numpy()[on]
        if stream == "network":
            spans, lanes = np.concatenate([spans, spans]), np.append(lanes, self.events["peer"].to_numpy()[on])
        return np.array([_covered(spans[lanes == gpu]) for gpu in range(len(self.resources))])

    @property
    def utilisation(self) -> float:
        """Compute time / total, mean over GPUs (Aurora §8.1), of a training step over its groups of alike GPUs."""
        return float(self.busy("compute").mean() / self.total) if self.total else 0.0

    def seconds_of_kind(self) -> dict[str, float]:
        """Seconds of a forward pass's critical path per kind: from the first start to the last end of a kind in a layer,
        summed."""
        spans, passes = self._spans(), 2 * self.events["layer"].to_numpy() + self.events["model"].to_numpy()
        totals = {}
        for kind in INFERENCE_KINDS:
            mine = (self.events["kind"] == kind).to_numpy()
            there, place = np.unique(passes[mine], return_inverse=True)
            first, last = np.full(len(there), np.inf), np.full(len(there), -np.inf)
            np.minimum.at(first, place, spans[mine, 0])
            np.maximum.at(last, place, spans[mine, 1])
            totals[kind] = float((last - first).sum())
        return totals

    def busy_of_kind(self) -> dict[str, float]:
        """Seconds in which a kind runs, mean over the resources."""
        spans, lanes = self._spans(), self.events["resource"].to_numpy()
        totals = dict.fromkeys(KINDS, 0.0)
        for kind in KINDS:
            mine = (self.events["kind"] == kind).to_numpy()
            for lane in np.unique(lanes[mine]):
                totals[kind] += _covered(spans[mine & (lanes == lane)]) / len(self.resources)
        return totals

    def exposed_intervals(self, resource: int) -> np.ndarray:
        """float64[interval, 2]: when a resource's network is busy and it computes nothing."""
        mine = self.events["resource"].to_numpy() == resource
        spans = self._spans()
        network, compute = (_union(spans[mine & self._on(stream)]) for stream in ("network", "compute"))
        edges = np.unique(np.concatenate([network.ravel(), compute.ravel()]))
        middle = (edges[1:] + edges[:-1]) / 2
        exposed = _inside(middle, network) & ~_inside(middle, compute)
        return np.column_stack([edges[:-1][exposed], edges[1:][exposed]])

    def decomposition(self) -> dict[str, float]:
        """Seconds of exposed communication, exposed computation, both at once and neither, mean over the resources
        (Lancet, Figure 13). They add up to the total."""
        seconds_of = dict.fromkeys(("communication", "computation", "overlapped", "idle"), 0.0)
        spans, lanes = self._spans(), self.events["resource"].to_numpy()
        on_network, on_compute = self._on("network"), self._on("compute")
        for resource in range(len(self.resources)):
            mine = lanes == resource
            network, compute = _covered(spans[mine & on_network]), _covered(spans[mine & on_compute])
            either = _covered(spans[mine])
            seconds = (either - compute, either - network, network + compute - either, self.total - either)
            for name, value in zip(seconds_of, seconds, strict=True):
                seconds_of[name] += max(value, 0.0) / len(self.resources)
        return seconds_of

    def exposed_communication(self) -> float:
        """Seconds in which some GPU's network is busy and no GPU computes."""
        spans = self._spans()
        return _covered(spans) - _covered(spans[self._on("compute")]) if self._on("network").any() else 0.0

    @property
    def overlap(self) -> float:
        """Share of the network's busy time that is hidden under computation."""
        network = _covered(self._spans()[self._on("network")])
        return 1 - self.exposed_communication() / network if network else 0.0


def _union(spans: np.ndarray) -> np.ndarray:
    """float64[interval, 2]: the union of intervals float64[event, 2]."""
    if not len(spans):
        return np.empty((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    latest = np.maximum.accumulate(spans[:, 1])
    first = np.append(True, spans[1:, 0] > latest[:-1])
    last = np.append(first[1:], True)
    return np.column_stack([spans[first, 0], latest[last]])


def _length(intervals: np.ndarray) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def _inside(times: np.ndarray, intervals: np.ndarray) -> np.ndarray:
    """bool[time]: which times lie in one of the disjoint, ascending intervals."""
    place = np.searchsorted(intervals[:, 0], times, side="right") - 1
    return (place >= 0) & (times < intervals[np.maximum(place, 0), 1]) if len(intervals) else np.zeros(len(times), bool)


def _covered(spans: np.ndarray) -> float:
    return _length(_union(spans))


def balancedness(load: np.ndarray) -> np.ndarray:
    """Mean / max over the last axis (EPLB, vLLM, SGLang); 1 for a layer without load. load: float64[..., gpu]."""
    most = load.max(axis=-1)
    return np.where(most > 0, load.mean(axis=-1) / np.where(most > 0, most, 1), 1.0)
