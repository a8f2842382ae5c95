"""A finished launch: what its ranks measured, read from their files and laid beside what was predicted."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.costs import CostProfile
from engine.errors import InputError
from engine.launch.preparation.prepared import PreparedLaunch
from engine.launch.rank.difference import Difference
from engine.launch.rank.instructions import MACHINE_TIMES, REPORT
from engine.launch.results.prediction import fit_profile, predict
from engine.launch.results.timelines import measured_timelines, unreadable
from engine.plan import Plan
from engine.timeline import Timeline


@dataclass(frozen=True, eq=False)
class MeasuredPlan:
    """One plan of a finished launch, as it was asked for. totals: seconds of every timed pass; difference: from the
    unplanned output; measured is the pass of median length."""

    plan: Plan
    predicted: Timeline
    measured: Timeline
    totals: tuple[float, ...]
    difference: Difference


@dataclass(frozen=True, eq=False)
class Run:
    """A finished launch. runs: one a plan, in their order; tokens: how many were replayed; clock_error: seconds by which
    the clocks of two ranks may differ."""

    runs: tuple[MeasuredPlan, ...]
    device: str
    tokens: int
    profile: CostProfile
    clock_error: float


def read_run(launch: PreparedLaunch, folder: Path, cores: int | None = None) -> Run:
    """What the ranks of a launch left in its folder. Raises InputError when their outcome is not the unplanned one's, and
    when a file is missing or torn.

    cores: processors of the machines that they ran on (default: of this one).
    """
    instructions, outcome = launch.instructions, _read_json(folder / REPORT)
    differences = [Difference(*figures) for figures in outcome["differences"]]
    for plan, difference in zip(instructions.plans, differences, strict=True):
        if difference.share > 1:
            raise InputError(
                f"what {plan.name} computed differs from the unplanned computation by {difference.error:.2g} of its "
                f"largest number (allowed: {difference.allowed:.2g}); the run is not valid"
            )
    machine_times = _read_json(folder / MACHINE_TIMES)
    profile = fit_profile(machine_times, outcome["device"], instructions, cores or len(os.sched_getaffinity(0)))
    passes = measured_timelines(folder, instructions.ranks, len(instructions.plans), outcome["device"])
    measured_plans = []
    for plan, folded, timelines, difference in zip(launch.plans, instructions.plans, passes, differences, strict=True):
        totals = tuple(timeline.total for timeline in timelines)
        middle = int(np.argsort(totals)[len(totals) // 2])
        predicted = predict(launch, folded, profile, machine_times)
        measured_plans.append(MeasuredPlan(plan, predicted, timelines[middle], totals, difference))
    return Run(tuple(measured_plans), outcome["device"], launch.tokens, profile, outcome["clock_error"])


def _read_json(path: Path) -> dict[str, Any]:
    """What rank 0 wrote."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
