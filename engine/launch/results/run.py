"""A finished launch: its ranks' measurements paired with the prediction."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.costs import CostProfile
from engine.errors import InputError
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.rank.difference import Difference
from engine.launch.rank.instructions import MACHINE_TIMES, REPORT
from engine.launch.results.own import Generated, OwnFacts, OwnPrediction, pace_of
from engine.launch.results.prediction import fit_profile, predict
from engine.launch.results.run_files import measured_timelines, read_json
from engine.launch.results.scheduled import Scheduled
from engine.plan import Plan
from engine.timeline import Timeline


@dataclass(frozen=True, eq=False)
class MeasuredPlan:
    """One plan of a finished launch, as it was asked for.

    measured: the pass of median length
    totals: seconds of every timed pass
    difference: from the unplanned output; None: of a person's own model, not compared
    scheduled: the work of its scheduler, if one ran
    generated: by a person's own model; None: tokens were replayed
    """

    plan: Plan
    predicted: Timeline
    measured: Timeline
    totals: tuple[float, ...]
    difference: Difference | None
    scheduled: Scheduled | None = None
    generated: Generated | None = None


@dataclass(frozen=True, eq=False)
class Run:
    """A finished launch.

    runs: one a plan, in their order
    tokens: number replayed
    clock_error: seconds by which the clocks of two ranks may differ
    routing: the words on tokens that were not recorded; empty if all were
    own: of a person's own model
    """

    runs: tuple[MeasuredPlan, ...]
    device: str
    tokens: int
    profile: CostProfile
    clock_error: float
    routing: str = ""
    own: OwnFacts | None = None


def read_run(launch: PreparedLaunch, folder: Path, cores: int | None = None) -> Run:
    """Read the results of a launch from its folder. Raises InputError if the outcome is not the unplanned one's, and if
    a file is missing or torn.

    cores: processors of the machines that they ran on (default: of this one)
    """
    instructions, outcome = launch.instructions, read_json(folder / REPORT)
    differences = [figures and Difference(*figures) for figures in outcome["differences"]]
    for plan, difference in zip(instructions.plans, differences, strict=True):
        if difference is not None and difference.share > 1:
            raise InputError(
                f"what {plan.name} computed differs from the unplanned computation by {difference.error:.2g} of its "
                f"largest number (allowed: {difference.allowed:.2g}); the run is not valid"
            )
    machine_times, device, own = read_json(folder / MACHINE_TIMES), outcome["device"], outcome.get("own")
    cores = cores or len(os.sched_getaffinity(0))
    passes = measured_timelines(folder, instructions.ranks, len(instructions.plans), device)
    if own is None:
        prediction = None
        profile = fit_profile(machine_times, device, instructions, cores)
    else:
        prediction = OwnPrediction(launch, folder, passes, machine_times, device, cores)
        profile = prediction.profile
    measured_plans = []
    decided = outcome.get("decisions") or [[] for _ in launch.plans]
    for number, timelines in enumerate(passes):
        folded, totals = instructions.plans[number], tuple(timeline.total for timeline in timelines)
        median = timelines[int(np.argsort(totals)[len(totals) // 2])]
        generated = None
        if prediction is None:
            predicted = predict(launch, folded, profile, machine_times)
        else:
            predicted, size = prediction.timeline(folded), (len(instructions.own.prompts), instructions.own.new_tokens)
            paces = tuple(pace_of(timeline, *size) for timeline in timelines)
            same = None if own["same_tokens"] is None else own["same_tokens"][number]
            generated = Generated(pace_of(median, *size), pace_of(predicted, *size), paces, same)
        scheduled = Scheduled.of(decided[number], predicted, median) if decided[number] else None
        outputs = differences[number], scheduled, generated
        measured_plans.append(MeasuredPlan(launch.plans[number], predicted, median, totals, *outputs))
    facts = None if prediction is None else prediction.facts(own)
    more = {"clock_error": outcome["clock_error"], "routing": launch.routing, "own": facts}
    return Run(tuple(measured_plans), device, launch.tokens, profile, **more)
