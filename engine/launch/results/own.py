"""A person's own model in a finished launch: the pace of its passes, and their prediction.

MoE layers are simulated pass by pass of the model, with the costs measured at the start, for the routing that the texts had:
the ranks write it down in the warm-up. What is no MoE layer is not predicted, as no plan changes it; its seconds are those
measured in the same launch under its last plan, the one that the others are compared with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from engine.costs import CostProfile
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.rank.instructions import ROUTING_OF_RANK
from engine.launch.results.prediction import fit_profile, predict
from engine.launch.results.run_files import arrays_of
from engine.plan import Plan
from engine.timeline import COLUMNS, KINDS, PREFILL_LABEL, SIZES, STREAMS, TOKEN_LABEL, Timeline
from engine.workload import RoutingTrace

MOST_SIMULATED = 64
"""Most tokens of a pass that are simulated, after the first; of more, each stands for some neighbours."""


@dataclass(frozen=True)
class Pace:
    """The pace of a pass.

    prefill_seconds: until all texts have their first new token (time to first token)
    token_seconds: of each further one of every text; None if there is none
    tokens_per_second: new tokens of all texts over the whole pass
    """

    prefill_seconds: float
    token_seconds: float | None
    tokens_per_second: float


@dataclass(frozen=True)
class Generated:
    """The tokens generated under a plan. measured: of the median pass; passes: of every timed one; same_tokens: as those of the
    unplanned model, None: not compared"""

    measured: Pace
    predicted: Pace
    passes: tuple[Pace, ...]
    same_tokens: bool | None


@dataclass(frozen=True)
class OwnFacts:
    """A person's own model in a finished launch.

    random_weights: True if the folder has none
    padded: tokens that were computed to make the texts of a rank equally long
    not_compared: why there is no unplanned model to compare with; "" if there was one
    predicted_from: what the predictions are made of, and what of them is measured, a sentence
    predicted_memory, measured_memory: bytes of weights on every rank, with the experts of all plans
    """

    folder: str
    random_weights: bool
    prompts: int
    prompt_tokens: int
    new_tokens: int
    padded: int
    not_compared: str
    predicted_from: str
    predicted_memory: tuple[float, ...]
    measured_memory: tuple[float, ...]


def pace_of(timeline: Timeline, texts: int, new_tokens: int) -> Pace:
    """The pace of a pass in which each of the texts got so many new tokens."""
    first = np.array([label == PREFILL_LABEL for label in timeline.labels])
    prefill, whole = float(timeline.events["end"].to_numpy()[first].max()), timeline.total
    return Pace(prefill, (whole - prefill) / (new_tokens - 1) if new_tokens > 1 else None, texts * new_tokens / whole)


class OwnPrediction:
    """The predicted timelines of a launch's plans.

    passes: measured timelines of every plan
    machine_times: as returned by `measure_machine_for_own`
    device, cores: see `fit_profile`
    """

    def __init__(
        self,
        launch: PreparedLaunch,
        folder: Path,
        passes: Sequence[Sequence[Timeline]],
        machine_times: dict[str, Any],
        device: str,
        cores: int,
    ) -> None:
        self.launch, instructions = launch, launch.instructions
        still = {"meetings": [[0, 0.0], [1, 0.0]]}  # live ranks do not meet between the steps of a layer
        measured = [machine_times, machine_times.get("decode", machine_times)]
        self._measured = [times | still for times in measured]
        self._profiles = [fit_profile(times, device, instructions, cores) for times in measured]
        self._sizes = machine_times["sizes"][0][1] if "sizes" in machine_times else 0.0
        parts = [arrays_of(folder / ROUTING_OF_RANK.format(rank)).values() for rank in range(instructions.ranks)]
        self._routing = [self._trace(of_ranks) for of_ranks in zip(*parts, strict=True)]
        self._besides = besides(passes[-1], instructions.ranks)

    @property
    def profile(self) -> CostProfile:
        """The costs of the first pass of the model."""
        return self._profiles[0]

    def facts(self, reported: dict[str, Any]) -> OwnFacts:
        """The facts on the model for the answer. reported: see `OwnRank.facts`"""
        own, ranks = self.launch.instructions.own, self.launch.instructions.ranks
        return OwnFacts(
            folder=own.folder,
            random_weights=reported["random"],
            prompts=len(own.prompts),
            prompt_tokens=sum(map(len, own.prompts)),
            new_tokens=own.new_tokens,
            padded=own.padded(ranks),
            not_compared="" if own.compared else "rank 0 had no room for the model without a plan",
            predicted_from="MoE layers are simulated with costs measured at the start, for the routing that these texts had; "
            f"attention and all else take what they took in this launch under {self.launch.plans[-1].name}",
            predicted_memory=tuple(reported["predicted_memory"]),
            measured_memory=tuple(reported["memory"]),
        )

    def timeline(self, plan: Plan) -> Timeline:
        """The predicted pass under a plan, on its ranks."""
        plan = plan.model_copy(update={"execution": "vanilla", "claim": None, "reaction": None})
        frames, labels, end = [], [], 0.0
        every = -(-max(1, len(self._routing) - 1) // MOST_SIMULATED)
        for step, trace in enumerate(self._routing):
            label = f"{TOKEN_LABEL}{step + 1}" if step else PREFILL_LABEL
            if step == 0 or (step - 1) % every == 0:
                phase = min(step, 1)
                alone = replace(self.launch, workloads=(trace,))
                simulated = predict(alone, plan, self._profiles[phase], self._measured[phase])
                whole = whole_exchanges(simulated.events)
            events = with_besides(whole, self._besides[label], self._sizes)
            frames.append(events.assign(start=events["start"] + end, end=events["end"] + end))
            labels += [label] * len(events)
            end = float(frames[-1]["end"].max())
        events = pd.concat(frames, ignore_index=True)
        events = events.assign(
            kind=pd.Categorical(events["kind"], categories=list(KINDS)),
            stream=pd.Categorical(events["stream"], categories=list(STREAMS)),
        )
        return Timeline(events[list(COLUMNS)], simulated.resources, "simulated", simulated.cost_source, tuple(labels))

    def _trace(self, of_ranks: Sequence[np.ndarray]) -> RoutingTrace:
        source = np.repeat(np.arange(len(of_ranks), dtype=np.int32), [len(part) for part in of_ranks])
        model = self.launch.instructions.model
        return RoutingTrace("the texts", np.concatenate(of_ranks), model.experts, source_rank=source)


class Besides(NamedTuple):
    """Seconds of what is no MoE layer, before each layer and after the last one, medians of several passes.

    of_rank: float64[layer + 1, rank]
    slowest: float64[layer + 1]; of the rank that took longest in a pass, for which the others wait at the next exchange
    """

    of_rank: np.ndarray
    slowest: np.ndarray


def besides(passes: Sequence[Timeline], ranks: int) -> dict[str, Besides]:
    """The seconds of what is no MoE layer in these passes of one plan, by label."""
    frames = []
    for number, timeline in enumerate(passes):
        frame = timeline.events.assign(label=timeline.labels, number=number)
        frames.append(frame[frame["kind"] == "attention"])
    frame = pd.concat(frames, ignore_index=True)
    frame["seconds"] = frame["end"] - frame["start"]
    layers, tables = int(frame["layer"].max()) + 1, {}
    for label, own in frame.groupby("label"):
        seconds = np.zeros((len(passes), layers + 1, ranks))  # layer -1 is behind the last one
        np.add.at(seconds, tuple(own[name].to_numpy() for name in ("number", "layer", "resource")), own["seconds"].to_numpy())
        tables[label] = Besides(np.median(seconds, axis=0), np.median(seconds.max(axis=2), axis=0))
    return tables


def whole_exchanges(events: pd.DataFrame) -> pd.DataFrame:
    """The events of a simulated pass (see `Timeline.events`) with one an exchange and rank, as live ranks note them: from the
    first send to the last that the rank sends or receives."""
    network = (events["stream"] == "network").to_numpy()
    sends = events[network]
    received = sends[sends["peer"] >= 0]
    both = pd.concat([sends, received.assign(resource=received["peer"], bytes=0.0)])
    own = both.groupby(["layer", "kind", "resource"], observed=True, sort=False)
    whole = own.agg(start=("start", "min"), end=("end", "max"), bytes=("bytes", "sum")).reset_index()
    whole = whole.assign(stream="network", model=0, peer=-1)
    return pd.concat([events[~network].astype({"stream": object, "kind": object}), whole], ignore_index=True)


def with_besides(events: pd.DataFrame, others: Besides, sizes: float) -> pd.DataFrame:
    """The events of a simulated pass with what comes before each layer and after the last, and the exchange of sizes.

    sizes: seconds before each dispatch
    """
    layer, seconds = events["layer"].to_numpy(), others.of_rank
    layers, ranks = seconds.shape[0] - 1, seconds.shape[1]
    gates = (events["kind"] == "gate").to_numpy()
    late = np.cumsum(others.slowest[:-1]) + sizes * np.arange(layers)
    shift = late[layer] + np.where(gates, 0.0, sizes)
    begins = np.array([events["start"].to_numpy()[layer == at].min() for at in range(layers)])
    gated = np.array([events["end"].to_numpy()[gates & (layer == at)].max() for at in range(layers)]) + late
    moved = events.assign(start=events["start"] + shift, end=events["end"] + shift)
    starts = np.append(begins + late - others.slowest[:-1], moved["end"].max())
    rank, place = np.tile(np.arange(ranks), layers + 1), np.repeat(np.arange(layers + 1), ranks)
    extra = pd.DataFrame({"resource": rank, "start": starts[place], "end": starts[place] + seconds.ravel()})
    extra = extra.assign(stream="compute", kind="attention", layer=np.where(place < layers, place, -1))
    frames = [moved, extra]
    if sizes:
        place, rank = place[:-ranks], rank[:-ranks]
        known = pd.DataFrame({"resource": rank, "start": gated[place], "end": gated[place] + sizes, "layer": place})
        frames.append(known.assign(stream="network", kind=SIZES))
    whole = pd.concat([frame.assign(model=0, peer=-1, bytes=frame.get("bytes", 0.0)) for frame in frames], ignore_index=True)
    return whole.sort_values("start", ignore_index=True, kind="stable")
