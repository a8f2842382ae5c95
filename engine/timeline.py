"""The timeline: the events of a run, and the figures that follow from them. One type for predicted and for measured runs, so
that they can be compared.

`Balance` is the evenness of loads. The number of one layer has three names: the overload factor, largest / mean load
(Megatron-LM, pull request #4110); its inverse, balancedness (see `Balance.of_engines`); and the imbalance ratio, the overload
factor less 1 (TensorRT-LLM). Over layers, Megatron-LM asks for percentiles (issue #2398), for a mean hides the layers that all
others wait for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from engine.schema import require_finite
from engine.units import digits, ratio

if TYPE_CHECKING:
    import pandas as pd

STREAMS = ("compute", "network", "host")
"""The last one carries copies between a GPU and its host, and the work of a scheduler there."""
COMPUTE_KINDS = ("dense", "gate", "ffn", "aggregate", "dx", "dw", "attention")
SIZES = "sizes"
"""The exchange of the sizes of an all-to-all of real tokens only, before it (Lancet §6)."""
SCHEDULER_KINDS = ("estimate", "schedule", "check")
"""The steps of a scheduler at run time, on the host: an estimate of the experts that will be chosen, a hosting made for it or
for the real choices, and a comparison of both (Lina §5.2)."""
HOST_KINDS = ("host_copy", *SCHEDULER_KINDS)
NETWORK_KINDS = ("dispatch", "combine", "all_gather", "all_reduce", "prompt_gather", SIZES)
KINDS = (
    *("dense", "gate", "ffn", "aggregate", "dx", "dw", "dispatch", "combine", "all_gather", "all_reduce"),
    *("prompt_gather", "attention", SIZES, *HOST_KINDS),
)
"""All kinds, at the places by which saved timelines know them: new ones come last."""
INFERENCE_KINDS = ("attention", "gate", "ffn", "aggregate", "prompt_gather", "dispatch", "combine", "all_gather")
"""The kinds of a forward pass through the MoE layers alone."""

PREFILL_LABEL, TOKEN_LABEL = "prefill", "token "
"""Labels of the events of a model that generates: until the first new token, and, with its number, for every further one."""

COLUMNS = ("resource", "stream", "start", "end", "kind", "layer", "model", "peer", "bytes")


@dataclass(frozen=True, eq=False)
class Timeline:
    """Events of one run.

    events: one row an event, columns `resource` (int, GPU), `stream` (one of STREAMS), `start`, `end` (seconds),
        `kind` (one of KINDS), `layer` (MoE layer), `model` (0, or 1 for the second of two colocated models), `peer` (the
        GPU a send goes to, -1 for computation), `bytes`
    resources: lane name of every GPU, or of every group of GPUs that do the same at the same time
    source: "simulated" or "measured" times
    cost_source: the cost model (or machine) that they come from
    labels: for a training step, the operator (and part) of every event, by the row of `events`; for a model that generates,
        the token that it is for
    bundled: True if sends are folded (see `engine.simulate.events`): an event of the network is then a bundle, a stretch in
        which a GPU sends or receives in an all-to-all without a gap, with the bytes that it sends in it and peer -1. Among the
        GPUs that end a step at the same moment, the one that the others wait for stands first. All figures are the same.
    exact: True if every end of a send was simulated as an event of its own (see `engine.simulate.flows`)
    latest: seconds; if not exact, the latest end that an exact simulation can have, if that was proven

    Raises InputError where a time or a number of bytes is not finite.
    """

    events: "pd.DataFrame"
    resources: tuple[str, ...]
    source: Literal["simulated", "measured"]
    cost_source: str
    labels: tuple[str, ...] | None = None
    bundled: bool = False
    exact: bool = True
    latest: float | None = None

    def __post_init__(self) -> None:
        require_finite(self.latest, *(self.events[name].to_numpy(np.float64) for name in ("start", "end", "bytes")))

    def to_dict(self) -> dict:
        """Plain JSON: the events as columns, times in seconds."""
        columns = {name: self.events[name].tolist() for name in COLUMNS}
        document = {"resources": list(self.resources), "source": self.source, "cost_source": self.cost_source}
        document["events"] = columns
        document |= {} if self.labels is None else {"labels": list(self.labels)}
        document |= {"bundled": True} if self.bundled else {}
        return document | ({} if self.exact else {"exact": False, "latest": self.latest})

    @classmethod
    def from_dict(cls, data: dict) -> "Timeline":
        """The timeline that `to_dict` described."""
        import pandas as pd

        events = pd.DataFrame({name: data["events"][name] for name in COLUMNS})
        events["stream"] = pd.Categorical(events["stream"], categories=list(STREAMS))
        events["kind"] = pd.Categorical(events["kind"], categories=list(KINDS))
        labels = tuple(data["labels"]) if "labels" in data else None
        about = (tuple(data["resources"]), data["source"], data["cost_source"], labels, data.get("bundled", False))
        return cls(events, *about, data.get("exact", True), data.get("latest"))

    def layers(self, first: int, last: int) -> "Timeline":
        """The events of MoE layers first … last, both included, at their times in the whole."""
        layer = self.events["layer"].to_numpy()
        rows = np.flatnonzero((layer >= first) & (layer <= last))
        labels = None if self.labels is None else tuple(self.labels[row] for row in rows)
        return replace(self, events=self.events.iloc[rows].reset_index(drop=True), labels=labels)

    @property
    def total(self) -> float:
        """Seconds from 0 to the last end."""
        return float(self.events["end"].max()) if len(self.events) else 0.0

    def _spans(self) -> np.ndarray:
        """The start and the end of every event: float64[event, 2] seconds."""
        # Column by column: pandas takes ten times as long to choose two of its columns by their names.
        return np.column_stack([self.events[name].to_numpy(np.float64) for name in ("start", "end")])

    def _on(self, stream: str) -> np.ndarray:
        """The events of a stream: bool[event]."""
        return (self.events["stream"] == stream).to_numpy()

    def _busy(self, on: np.ndarray) -> np.ndarray:
        """Seconds in which at least one of some events occupies a GPU: float64[gpu]. A send occupies both of its ends.

        on: bool[event]; the events that count
        """
        spans, lanes, peers = self._spans()[on], *(self.events[name].to_numpy()[on] for name in ("resource", "peer"))
        sends = peers >= 0
        intervals, lane, _ = unions(np.concatenate([spans, spans[sends]]), np.append(lanes, peers[sends]))
        return np.bincount(lane, intervals[:, 1] - intervals[:, 0], len(self.resources))

    def busy(self, stream: str) -> np.ndarray:
        """Seconds in which a GPU's stream has at least one event: float64[gpu]. A send occupies both of its ends."""
        return self._busy(self._on(stream))

    @property
    def utilisation(self) -> float:
        """Compute time / total, mean over GPUs (Aurora §8.1), or over the groups of alike GPUs of a training step."""
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
        """Seconds in which a kind runs, mean over the resources; what runs on the host only where there is some."""
        kinds = self.events["kind"]
        known = [kind for kind in KINDS if kind not in HOST_KINDS or (kinds == kind).any()]
        return {kind: float(self._busy((kinds == kind).to_numpy()).mean()) for kind in known}

    def exposed_intervals(self, resource: int) -> np.ndarray:
        """The intervals in which a resource's network is busy and it computes nothing: float64[interval, 2] seconds."""
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
        on_network = self._on("network")
        on_compute = self._on("compute")
        network, compute, either = map(self._busy, (on_network, on_compute, on_network | on_compute))
        seconds = {
            "communication": either - compute,
            "computation": either - network,
            "overlapped": network + compute - either,
            "idle": self.total - either,
        }
        return {name: float(np.maximum(of_gpu, 0.0).mean()) for name, of_gpu in seconds.items()}

    def exposed_communication(self) -> float:
        """Seconds in which some GPU's network is busy and no GPU computes."""
        spans, compute, network = self._spans(), self._on("compute"), self._on("network")
        return _covered(spans[compute | network]) - _covered(spans[compute]) if network.any() else 0.0

    @property
    def overlap(self) -> float:
        """Share of the network's busy time that is hidden under computation."""
        network = _covered(self._spans()[self._on("network")])
        return max(0.0, 1 - self.exposed_communication() / network) if network else 0.0  # rounding takes it below


def unions(spans: np.ndarray, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The union of the intervals of every lane.

    spans: float64[event, 2]; start and end
    lanes: int64[event]

    Returns float64[interval, 2], the intervals by lane and time; int64[interval], their lanes; and int64[event], the interval
    that each event lies in.
    """
    if not len(spans):
        return np.empty((0, 2)), np.empty(0, np.int64), np.empty(0, np.int64)
    # All start at once, as in a concurrent all-to-all: one interval a lane, nothing to sort.
    if np.ptp(spans[:, 0]) == 0:
        there = np.bincount(lanes) > 0
        place = np.cumsum(there)[lanes] - 1
        latest = np.full(np.count_nonzero(there), -np.inf)
        np.maximum.at(latest, place, spans[:, 1])
        return np.column_stack([np.full(len(latest), spans[0, 0]), latest]), np.flatnonzero(there), place
    order = np.lexsort((spans[:, 0], lanes))
    (start, end), lane = spans[order].T, lanes[order].astype(np.int64)
    by_end = np.argsort(end, kind="stable")
    rank = np.empty(len(end), dtype=np.int64)
    rank[by_end] = np.arange(len(end))
    # The latest end so far in the same lane: maxima of ranks behind the lane, which only grows.
    latest = end[by_end[np.maximum.accumulate(lane * len(end) + rank) % len(end)]]
    first = np.append(True, (lane[1:] != lane[:-1]) | (start[1:] > latest[:-1]))
    place = np.empty(len(end), dtype=np.int64)
    place[order] = np.cumsum(first) - 1
    return np.column_stack([start[first], latest[np.append(first[1:], True)]]), lane[first], place


def _union(spans: np.ndarray) -> np.ndarray:
    """The union of intervals, ascending: float64[interval, 2]. spans: float64[event, 2]"""
    return unions(spans, np.zeros(len(spans), dtype=np.int64))[0]


def _inside(times: np.ndarray, intervals: np.ndarray) -> np.ndarray:
    """The times that lie in one of the disjoint, ascending intervals: bool[time]."""
    place = np.searchsorted(intervals[:, 0], times, side="right") - 1
    return (place >= 0) & (times < intervals[np.maximum(place, 0), 1]) if len(intervals) else np.zeros(len(times), bool)


def _covered(spans: np.ndarray) -> float:
    """Seconds of the union of intervals. spans: float64[event, 2]"""
    return float(np.diff(_union(spans)).sum())


def balancedness(load: np.ndarray) -> np.ndarray:
    """Mean / max over the last axis (EPLB): float64[...]; 1 for a layer without load. load: float64[..., gpu]"""
    most = load.max(axis=-1)
    return np.where(most > 0, load.mean(axis=-1) / np.where(most > 0, most, 1), 1.0)


PERCENTILES = (50, 75, 90, 95)


@dataclass(frozen=True)
class Balance:
    """The evenness of loads in every layer.

    overload: float64[layer] as a tuple; the largest load over the mean one. 1 is even, and stands for a layer without load
    mean_load: float64[layer] as a tuple, in any unit; without it layers weigh alike
    dense_layers: layers without experts, which SGLang counts as even
    """

    overload: tuple[float, ...]
    mean_load: tuple[float, ...] = ()
    dense_layers: int = 0

    @classmethod
    def of(cls, load: np.ndarray, dense_layers: int = 0) -> "Balance":
        """The balance of loads.

        load: float64[layer, gpu], or float64[layer, expert] to compare experts
        dense_layers: see `Balance`
        """
        return cls(tuple((1 / balancedness(load)).tolist()), tuple(load.mean(axis=1).tolist()), dense_layers)

    @property
    def of_engines(self) -> dict[str, float]:
        """The one number that each engine calls balancedness: EPLB's the mean over MoE layers; SGLang's (0.5.23) over all
        layers, dense ones as 1; vLLM's (0.33.0) the mean load of all layers together over their largest loads together."""
        mean = np.array(self.mean_load or (1.0,) * len(self.overload))
        largest = float((mean * np.array(self.overload)).sum())
        layers = len(self.overload) + self.dense_layers
        return {
            "EPLB": self.balancedness,
            "SGLang": (self.balancedness * len(self.overload) + self.dense_layers) / layers,
            "vLLM": float(mean.sum()) / largest if largest else 1.0,
        }

    @property
    def mean(self) -> float:
        """The mean over layers: Megatron-LM's `avg_overload_factor`."""
        return float(np.mean(self.overload))

    @property
    def worst(self) -> float:
        """The factor of the least even layer: Megatron-LM's `max_overload_factor`."""
        return max(self.overload)

    @property
    def balancedness(self) -> float:
        """The mean over MoE layers of mean / max load; not the inverse of `mean`, which weighs uneven layers more."""
        return float(np.mean([1 / factor for factor in self.overload]))

    @property
    def in_words(self) -> str:
        """`0.404 (EPLB), 0.434 (SGLang), 0.347 (vLLM)`."""
        return ", ".join(f"{digits(number)} ({engine})" for engine, number in self.of_engines.items())

    @property
    def imbalance_ratio(self) -> float:
        """The mean over layers of max / mean - 1, as TensorRT-LLM reports it."""
        return self.mean - 1

    @property
    def percentiles(self) -> dict[str, float]:
        """p50, p75, p90 and p95 of the overload factors over layers, linear between two of them."""
        names = (f"p{percentile}" for percentile in PERCENTILES)
        return dict(zip(names, np.percentile(self.overload, PERCENTILES).tolist(), strict=True))

    @property
    def factors(self) -> dict[str, float]:
        """Overload factors over layers: `mean`, the percentiles and `max`."""
        return {"mean": self.mean, **self.percentiles, "max": self.worst}

    def to_dict(self) -> dict[str, Any]:
        """Overload factor and imbalance ratio over layers, each as mean, percentiles and max, and the factor of every layer."""
        return {
            "overload_factor": self.factors,
            "imbalance_ratio": {name: factor - 1 for name, factor in self.factors.items()},
            "overload_factor_of_layer": list(self.overload),
            "mean_load_of_layer": list(self.mean_load),
            "dense_layers": self.dense_layers,
            "balancedness": self.of_engines,
        }


def over_layers(factors: Mapping[str, float]) -> str:
    """`Balance.factors` as `p50 1.2×, p75 1.31×, p90 1.44×, p95 1.5×, worst 1.61×`."""
    shown = {"worst" if name == "max" else name: factor for name, factor in factors.items() if name != "mean"}
    return ", ".join(f"{name} {ratio(factor)}" for name, factor in shown.items())
