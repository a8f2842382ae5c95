"""The work of a plan's scheduler in a launch (Lina sections 5.2 and 6.2): foreseen, and as it was measured.

The foreseen decisions are those of the same rules on the same tokens. Their price is that of the simulation: counting and
hosting on a host of assumed speed, on the ranks' links; and weights at the assumed rate of a GPU's link to its host, or for
ranks on processors at the rate of memory that the launch has measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from engine.launch.preparation.launch import PreparedLaunch
from engine.placement.devices.search import Hosting
from engine.plan import Placement, Plan
from engine.problem import Problem
from engine.simulate.scheduler import (
    HOST_BANDWIDTH,
    HOST_START_UP,
    HOST_STEP,
    Decision,
    Scheduler,
    counting_seconds,
    options_of,
    reaction_seconds,
)
from engine.timeline import Timeline
from engine.units import bandwidth, seconds, size

ASSUMED = (
    f"the scheduler at {seconds(HOST_STEP)} a step and {seconds(HOST_START_UP)} a copy to or from its host (assumed), and "
    f"weights out of host memory at {bandwidth(HOST_BANDWIDTH)} on GPUs (assumed), on processors as fast as their memory"
)
"""The costs of a foreseen scheduler, in words."""

MANY = 2.0**40
"""Bytes of which memory takes its rate alone."""

PIECES = {
    ("estimate", False): "estimate of the next layer",
    ("schedule", False): "hosting for the estimate",
    ("host_copy", False): "weights for the estimate",
    ("waited", False): "waited for them after the layer",
    ("check", True): "check after the gate",
    ("schedule", True): "hosting again",
    ("host_copy", True): "weights again",
}
"""Pieces of a scheduler's work by kind of event, and True for phase two."""


@dataclass(frozen=True, eq=False)
class Foreseen:
    """A scheduler's decisions on a launch's batch, before it runs."""

    scheduler: Scheduler
    decisions: list[Decision]

    @classmethod
    def of(cls, plan: Plan, launch: PreparedLaunch) -> "Foreseen":
        """plan: as folded onto the ranks"""
        (trace,) = launch.workloads
        scheduler = Scheduler(options_of(plan.reaction, trace.k, trace.tokens), launch.profile, plan.placement.gpus)
        return cls(scheduler, scheduler.decisions(trace.experts, plan.placement.experts_of_gpu))

    def hosted(self, plan: Plan) -> Plan:
        """The plan with every layer hosted as decided, and no scheduler."""
        rows = tuple(decision.hosting for decision in self.decisions)
        layers = plan.placement.model_layers
        placement = Placement(experts=plan.placement.experts, experts_of_gpu=rows, model_layers=layers)
        return plan.with_parts(placement=placement, reaction=None)

    def added_to(self, events: pd.DataFrame, problem: Problem, on_gpus: bool, stop: float) -> pd.DataFrame:
        """The events of the hosted plan (see `Timeline.events`) with the scheduler's, and late by what is waited for. Phase one
        begins behind the gate of the layer before, when its choices are counted, and phase two behind the layer's own.

        problem: with the ranks as its cluster
        stop: seconds between two steps for which the clocks are stopped, as behind phase two
        """
        weights, rate = problem.model.bytes_per_expert, HOST_BANDWIDTH
        if not on_gpus:  # read and written in the same memory; of many bytes, as a copy starts sooner than what was measured
            rate = MANY / float(problem.cost.memory_pass(problem.cluster.gpus[0], np.array(2 * MANY)))
        options = replace(self.scheduler.options, host_bandwidth=rate)
        counting, (answering, checking) = counting_seconds(problem, options), reaction_seconds(problem, options)
        layer, gates = events["layer"].to_numpy(), (events["kind"] == "gate").to_numpy()
        start, end, ranks = events["start"].to_numpy(), events["end"].to_numpy(), range(self.scheduler.devices)
        added: list[tuple] = []

        def log(kind: str, at: int, now: float, length: float) -> float:
            added.extend((rank, now, now + length, kind, at, 0.0) for rank in ranks)
            return now + length

        def hosted(at: int, now: float, hosting: Hosting, already: Hosting | None) -> float:
            now = log("schedule", at, now, answering - counting)
            copied = [len(self.scheduler.missing(rank, hosting, already)) * weights for rank in ranks]
            added.extend((rank, now, now + own / rate, "host_copy", at, own) for rank, own in enumerate(copied) if own)
            return now + max(copied) / rate

        late, late_gate = np.zeros((2, len(self.decisions)))
        waited = 0.0
        for at, decision in enumerate(self.decisions):
            here, late_gate[at] = layer == at, waited
            now = gated = end[here & gates].max() + waited
            if decision.predicted is not None:
                now = log("check", at, gated, counting if decision.off else checking)
            if decision.off:
                now = hosted(at, now, decision.hosting, decision.predicted)
            if decision.predicted is not None:
                now += stop
            late[at] = waited = waited + now - gated
            following = self.decisions[at + 1].predicted if at + 1 < len(self.decisions) else None
            if following is not None:
                now = log("estimate", at, start[here & ~gates].min() + waited, counting)
                waited += max(0.0, hosted(at, now, following, None) - end[here].max() - waited)
        late = np.where(gates, late_gate[layer], late[layer])
        frame = pd.DataFrame(added, columns=["resource", "start", "end", "kind", "layer", "bytes"])
        frame = frame.assign(stream="host", model=0, peer=-1)[[*events.columns]]
        frame = frame.astype({name: events[name].dtype for name in ("stream", "kind")})
        whole = pd.concat([events.assign(start=start + late, end=end + late), frame], ignore_index=True)
        return whole.sort_values("start", kind="stable", ignore_index=True)


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A plan's scheduler in a launch, foreseen and measured in the median pass.

    decisions: as the ranks made them
    as_foreseen: True if it did what was foreseen, on all ranks
    fetched: bytes of weights, foreseen and measured
    pieces: (name, seconds foreseen, seconds measured); of the slowest rank of each layer, summed over the layers
    """

    decisions: list[Decision]
    as_foreseen: bool
    fetched: tuple[float, float]
    pieces: tuple[tuple[str, float, float], ...]

    @classmethod
    def of(cls, decided: Sequence[Sequence[Any]], predicted: Timeline, measured: Timeline) -> "Scheduled":
        """decided: the decisions that the ranks reported, as JSON"""

        def hosting(experts_of_device: Sequence[Sequence[int]] | None) -> Hosting | None:
            return None if experts_of_device is None else tuple(map(tuple, experts_of_device))

        decisions = [Decision(hosting(before), hosting(after), off) for before, after, off in decided]
        spent = [_seconds(timeline.events) for timeline in (predicted, measured)]
        done = [timeline.events[timeline.events["stream"] == "host"] for timeline in (predicted, measured)]
        same = [sorted(zip(own["kind"], own["layer"], own["resource"], own["bytes"], strict=True)) for own in done]
        return cls(
            decisions,
            as_foreseen=same[0] == same[1],
            fetched=tuple(float(own["bytes"].sum()) for own in done),
            pieces=tuple((name, *(seconds.get(key, 0.0) for seconds in spent)) for key, name in PIECES.items()),
        )

    @property
    def in_words(self) -> str:
        """The finding in words."""
        anew = sum(decision.predicted is not None for decision in self.decisions)
        again = sum(decision.off for decision in self.decisions)
        text = f"the scheduler hosted {anew} of {len(self.decisions)} MoE layers anew, {again} of them again after the gate"
        before, after = self.fetched
        weights = f"{size(after)} of weights were fetched out of host memory"
        weights += "" if before == after else f" (foreseen: {size(before)})"
        return f"{text}; {weights}: {'all as' if self.as_foreseen else 'other than'} foreseen"


def _seconds(events: pd.DataFrame) -> dict[tuple[str, bool], float]:
    """Seconds of the pieces by kind and phase, see `PIECES`. events: of a `Timeline`"""
    totals: dict[tuple[str, bool], float] = {}
    for _, of_layer in events.groupby("layer"):
        on_host = of_layer["stream"] == "host"
        own, steps = of_layer[on_host], of_layer[~on_host]
        # Phase two comes first; phase one of the next layer begins with its estimate.
        ahead = own[own["kind"] == "estimate"].set_index("resource")["start"]
        second = own["start"] < own["resource"].map(ahead).fillna(np.inf)
        spent = (own["end"] - own["start"]).groupby([own["kind"], second, own["resource"]], observed=True).sum()
        for key, slowest in spent.groupby(level=[0, 1], observed=True).max().items():
            totals[key] = totals.get(key, 0.0) + slowest
        waited = own.loc[~second, "end"].max() - steps["end"].max()
        totals["waited", False] = totals.get(("waited", False), 0.0) + (waited if waited > 0 else 0.0)
    return totals
