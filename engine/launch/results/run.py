"""A finished launch: its ranks' events as timelines, read from their files and paired with the prediction."""

import json
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from engine.costs import CostProfile
from engine.errors import InputError
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.rank.difference import Difference
from engine.launch.rank.instructions import MACHINE_TIMES, REPORT
from engine.launch.results.prediction import fit_profile, predict
from engine.launch.results.scheduled import Scheduled
from engine.plan import Plan
from engine.timeline import COLUMNS, HOST_KINDS, KINDS, NETWORK_KINDS, STREAMS, Timeline


def measured_timelines(folder: Path, ranks: int, plans: int, source: str) -> list[list[Timeline]]:
    """The timed passes of every plan of a launch, one timeline each, in order. A send is one event from its sender's post to
    its receiver's completion; a collective is one event on every rank. Raises InputError if a rank's file is missing or torn.

    source: the device that they were measured on
    """
    parts = []
    for rank in range(ranks):
        try:
            with np.load(path := folder / f"events-{rank}.npz", allow_pickle=False) as arrays:
                parts.append(pd.DataFrame({name: arrays[name] for name in arrays.files}).assign(seen_by=rank))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise unreadable(path, error) from None
    events = pd.concat(parts, ignore_index=True)
    sends = events["dst"] >= 0
    key = ["plan", "number", "layer", "kind", "model", "phase", "src", "dst", "row", "bytes", "label"]
    by_sender = events[sends & (events["seen_by"] == events["src"])].drop(columns="end")
    by_receiver = events[sends & (events["seen_by"] == events["dst"])][[*key, "end"]]
    joined = pd.concat([events[~sends], by_sender.merge(by_receiver, on=key)], ignore_index=True)
    names = tuple(f"rank {rank}" for rank in range(ranks))
    timelines: list[list[Timeline]] = [[] for _ in range(plans)]
    for (plan, _), timed_pass in joined.groupby(["plan", "number"]):
        begin = timed_pass["start"].min()
        timed_pass = timed_pass.assign(end=timed_pass["end"] - begin, start=timed_pass["start"] - begin)
        timed_pass = timed_pass.sort_values("start", ignore_index=True)
        on = [timed_pass["kind"].isin(kinds) for kinds in (NETWORK_KINDS, HOST_KINDS)]
        stream = np.select(on, ["network", "host"], "compute")
        frame = timed_pass.rename(columns={"src": "resource", "dst": "peer"}).assign(
            kind=pd.Categorical(timed_pass["kind"], categories=list(KINDS)),
            stream=pd.Categorical(stream, categories=list(STREAMS)),
        )
        labels = tuple(timed_pass["label"]) if timed_pass["label"].any() else None
        timelines[plan].append(Timeline(frame[list(COLUMNS)], names, "measured", source, labels))
    return timelines


def unreadable(path: Path, error: Exception) -> InputError:
    """The error for a file that a rank should have left whole."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else "it is torn"
    return InputError(f"the measurements in {path} cannot be read ({why}); launch again")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of rank 0. Raises InputError if it is missing or torn."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


@dataclass(frozen=True, eq=False)
class MeasuredPlan:
    """One plan of a finished launch, as it was asked for.

    measured: the pass of median length
    totals: seconds of every timed pass
    difference: from the unplanned output
    scheduled: the work of its scheduler, if one ran
    """

    plan: Plan
    predicted: Timeline
    measured: Timeline
    totals: tuple[float, ...]
    difference: Difference
    scheduled: Scheduled | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """A finished launch.

    runs: one a plan, in their order
    tokens: number replayed
    clock_error: seconds by which the clocks of two ranks may differ
    routing: the words on tokens that were not recorded; empty if all were
    """

    runs: tuple[MeasuredPlan, ...]
    device: str
    tokens: int
    profile: CostProfile
    clock_error: float
    routing: str = ""


def read_run(launch: PreparedLaunch, folder: Path, cores: int | None = None) -> Run:
    """Read the results of a launch from its folder. Raises InputError if the outcome is not the unplanned one's, and if
    a file is missing or torn.

    cores: processors of the machines that they ran on (default: of this one)
    """
    instructions, outcome = launch.instructions, read_json(folder / REPORT)
    differences = [Difference(*figures) for figures in outcome["differences"]]
    for plan, difference in zip(instructions.plans, differences, strict=True):
        if difference.share > 1:
            raise InputError(
                f"what {plan.name} computed differs from the unplanned computation by {difference.error:.2g} of its "
                f"largest number (allowed: {difference.allowed:.2g}); the run is not valid"
            )
    machine_times = read_json(folder / MACHINE_TIMES)
    profile = fit_profile(machine_times, outcome["device"], instructions, cores or len(os.sched_getaffinity(0)))
    passes = measured_timelines(folder, instructions.ranks, len(instructions.plans), outcome["device"])
    measured_plans = []
    decided = outcome.get("decisions") or [[] for _ in launch.plans]
    each = zip(launch.plans, instructions.plans, passes, differences, decided, strict=True)
    for plan, folded, timelines, difference, decisions in each:
        totals = tuple(timeline.total for timeline in timelines)
        middle = int(np.argsort(totals)[len(totals) // 2])
        predicted = predict(launch, folded, profile, machine_times)
        measured = timelines[middle]
        scheduled = Scheduled.of(decisions, predicted, measured) if decisions else None
        measured_plans.append(MeasuredPlan(plan, predicted, measured, totals, difference, scheduled))
    return Run(tuple(measured_plans), outcome["device"], launch.tokens, profile, outcome["clock_error"], launch.routing)
