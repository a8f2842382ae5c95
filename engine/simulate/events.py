"""Events of a simulation, collected as columns, the sends of large ones folded into bundles; and the GPU that all wait for in
each step of a forward pass.

A pass of 58 MoE layers on 1024 GPUs sends 120 million times. A chart draws a few thousand bars, and the figures of a
timeline need of the network only the busy times of GPUs and the last end. So above `MOST_SENDS` an all-to-all becomes
bundles, a GPU's busy stretches (mostly one a GPU); the sends of chosen layers are simulated again to look at them
(`engine.simulate.simulate_layers`).
"""

from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from engine.network import Network
from engine.plan import Travel
from engine.problem import Problem
from engine.simulate.flows import Flows
from engine.timeline import COLUMNS, KINDS, NETWORK_KINDS, STREAMS, Timeline, unions

STEP = ["model", "layer", "kind"]

STREAM, KIND = pd.CategoricalDtype(list(STREAMS)), pd.CategoricalDtype(list(KINDS))
"""Made once: a type is checked for doubles whenever it is made."""
SAME, OWN = ("stream", "kind", "layer", "model"), ("resource", "start", "end", "peer", "bytes")
"""The columns that are alike for all events of a step on all GPUs, and those that each event has of its own."""
MOST_SENDS = 200_000
"""Sends of a whole run that are events of their own; 32 GPUs and 61 MoE layers have 121 000, 64 GPUs 492 000."""


def last_of_steps(events: pd.DataFrame) -> pd.DataFrame:
    """The event that ends last in every step (a kind in a layer of a model), by its end; `seconds` is the distance to the end
    of the step before, so that they add up to the whole. A scheduler's work on the host is no step: most of it is hidden.

    events: of a `Timeline`
    """
    events = events[events["stream"] != "host"]
    last = events.loc[events.groupby(STEP, observed=True)["end"].idxmax()].sort_values("end")
    begin = events["start"].min() if len(events) else 0.0
    return last.assign(seconds=np.diff(last["end"].to_numpy(), prepend=begin))


def waited_for(src: np.ndarray, dst: np.ndarray, size: np.ndarray, last: tuple[int, int], network: Network) -> int:
    """The GPU that all others wait for in an all-to-all that ends with a send of the pair `last`: the end with the port that
    needs longer for all its bytes at full rate; the sender if both need as long.

    The length of its sends would mislead: a fast port that sends to many slow ones at once is as long at work as they are.

    src, dst: int64[send]
    size: float64[send] bytes
    """
    out, into = network.ports(src, dst)
    leaves, arrives = (int(port[0]) for port in network.ports(np.array(last[:1]), np.array(last[1:])))
    sent = size[out == leaves].sum() / network.capacity[leaves]
    received = size[into == arrives].sum() / network.capacity[arrives]
    return int(last[1] if received > sent else last[0])


def waits(timeline: Timeline, network: Network) -> pd.DataFrame:
    """One row a step of a forward pass: `model`, `layer`, `kind`, `gpu` (which all others wait for) and `seconds`, which add
    up to the timeline's total. For a send that ends last see `waited_for`; bundles have that GPU first."""
    events = timeline.events
    last = last_of_steps(events)
    gpu = last["resource"].to_numpy(copy=True)
    networked = events[events["kind"].isin(NETWORK_KINDS)]
    steps = dict(iter(networked.groupby(STEP, observed=True)))
    for row, event in enumerate(last.itertuples()):
        if event.peer < 0:
            continue
        step = steps[event.model, event.layer, event.kind]
        src, dst, size = (step[name].to_numpy() for name in ("resource", "peer", "bytes"))
        gpu[row] = waited_for(src, dst, size, (event.resource, event.peer), network)
    return last.assign(gpu=gpu)[[*STEP, "gpu", "seconds"]].reset_index(drop=True)


def too_many(*traffic: NDArray[np.float64]) -> bool:
    """True if a run with these all-to-alls (float64[layer, src, dst] bytes each) gets bundles: told by the pairs that send,
    known before anything is simulated, so that a timeline has either sends or bundles throughout."""
    pairs = sum(np.count_nonzero(matrices) - np.count_nonzero(matrices.diagonal(axis1=1, axis2=2)) for matrices in traffic)
    return bool(pairs > MOST_SENDS)


class EventLog:
    """Collects events; every method returns the seconds at which its step is over on all GPUs.

    network: carries the sends; bundles ask it for rates
    bundled: fold the sends
    exact: True as long as all sends were simulated exactly
    slack: seconds by which the last end may be earlier than an exact one; None: no limit is proven
    """

    def __init__(self, network: Network | None = None, bundled: bool = False) -> None:
        self.bundled, self.exact = bundled, True
        self._network = network
        self.slack: float | None = 0.0
        self._same: list[tuple[int, ...]] = []
        self._parts: list[tuple[np.ndarray, ...]] = []

    def compute(
        self, kind: str, layer: int, start: float | NDArray[np.float64], seconds: NDArray[np.float64], model: int = 0
    ) -> float:
        """A computation on every GPU.

        start: seconds, one for all or float64[gpu]
        seconds: float64[gpu], 0 = none
        """
        gpu = np.flatnonzero(seconds > 0)
        start = np.broadcast_to(start, seconds.shape)
        end, nobody, nothing = start + seconds, np.full(len(gpu), -1), np.zeros(len(gpu))
        self._add("compute", kind, layer, model, gpu, start[gpu], end[gpu], nobody, nothing)
        return float(end.max())

    def network(self, kind: str, layer: int, start: float, flows: Flows, model: int = 0) -> float:
        """The sends of an all-to-all, on the lane of their sender; the times of the flows count from `start`."""
        sends = Flows(flows.src, flows.dst, flows.bytes, start + flows.start, start + flows.end)
        if self.bundled and len(sends.src):
            self._add("network", kind, layer, model, *_bundles(sends, self._network))
        else:
            self._add("network", kind, layer, model, sends.src, sends.start, sends.end, sends.dst, sends.bytes)
        self.exact = self.exact and flows.exact
        if not flows.exact:
            unknown = self.slack is None or flows.latest is None
            self.slack = None if unknown else self.slack + flows.latest - flows.seconds
        return start + flows.seconds

    def timeline(self, problem: Problem, travel: Travel | None) -> Timeline:
        """All events as the predicted timeline of a plan for this problem. travel: the plan's"""
        source = problem.source_of_times(travel)
        timeline = Timeline(self.frame(), problem.cluster.gpu_names, "simulated", source, bundled=self.bundled)
        if self.exact:
            return timeline
        return replace(timeline, exact=False, latest=None if self.slack is None else timeline.total + self.slack)

    def _add(self, stream: str, kind: str, layer: int, model: int, resource, start, end, peer, size) -> None:
        self._same.append((STREAMS.index(stream), KINDS.index(kind), layer, model))
        self._parts.append((resource, start, end, peer, size))

    def frame(self) -> pd.DataFrame:
        """All events, with the columns of `Timeline.events`."""
        same = np.repeat(np.array(self._same).T, [len(part[0]) for part in self._parts], axis=1)
        own = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        columns = dict(zip((*SAME, *OWN), (*same, *own), strict=True))
        columns["stream"] = pd.Categorical.from_codes(columns["stream"], dtype=STREAM)
        columns["kind"] = pd.Categorical.from_codes(columns["kind"], dtype=KIND)
        return pd.DataFrame({name: columns[name] for name in COLUMNS})


def _bundles(sends: Flows, network: Network) -> tuple[np.ndarray, ...]:
    """resource, start, end, peer and bytes of the bundles, by GPU and time; but the one that ends last on the GPU that all
    others wait for stands first."""
    count, spans, both = len(sends.src), np.column_stack([sends.start, sends.end]), np.append(sends.src, sends.dst)
    if np.ptp(sends.start):
        stretches, gpu, place = unions(np.tile(spans, (2, 1)), both)
    else:  # all start together, so a GPU has one stretch
        busy = np.bincount(both) > 0
        gpu, place = np.flatnonzero(busy), np.cumsum(busy)[both] - 1
        stretches = np.tile(sends.start[:1], (len(gpu), 2))
        np.maximum.at(stretches[:, 1], place, np.tile(sends.end, 2))
    size = np.bincount(place[:count], sends.bytes, len(gpu))
    last = sends.end.argmax()
    pair = sends.src[last], sends.dst[last]
    awaited = waited_for(sends.src, sends.dst, sends.bytes, pair, network)
    first = place[last] if awaited == pair[0] else place[count + last]
    order = np.append(first, np.delete(np.arange(len(gpu)), first))
    start, end = stretches[order].T
    return gpu[order], start, end, np.full(len(gpu), -1), size[order]
