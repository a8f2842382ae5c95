"""Run plans on this machine with torchrun, and read what they measured beside what was predicted."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.costs import CostProfile
from engine.errors import InputError
from engine.launch.compare import measured_timelines
from engine.launch.prediction import fit_profile, predict
from engine.launch.prepare import Launch
from engine.launch.processes import run_processes
from engine.launch.spec import CALIBRATION, REPORT, write_spec
from engine.plan import Plan
from engine.result import Stop
from engine.store import data_folder
from engine.timeline import Timeline

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Largest difference from the unplanned output, relative to its largest number, that rounding alone can explain."""

Foretell = Callable[[Launch, Plan, CostProfile, dict[str, list]], Timeline]
"""A prediction, given the launch, one of its plans, the profile fitted at its start and the points it was fitted to, as
`calibrate` gives them."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One plan of a finished launch, as given. totals: seconds of every timed pass; difference: largest deviation from the
    unplanned output, relative to its largest number; measured is the pass of median length."""

    plan: Plan
    predicted: Timeline
    measured: Timeline
    totals: tuple[float, ...]
    difference: float


@dataclass(frozen=True, eq=False)
class Run:
    """A finished launch. runs: one a plan, in their order; tokens: how many were replayed; clock_error: seconds by which
    the clocks of two ranks may differ."""

    runs: tuple[Measured, ...]
    device: str
    tokens: int
    profile: CostProfile
    clock_error: float


def run(
    launch: Launch, folder: Path, stop: Stop, report, start: Callable[..., None] | None = None,
    foretell: Foretell | None = None,
) -> Run:  # fmt: skip
    """Run a prepared launch in `folder` and read its measurements. Raises InputError when it fails or is stopped, with
    the reason; what the ranks printed is on standard output, which a job keeps as its log.

    start: runs the ranks to their end, given launch, folder, stop and report (default: torchrun on this machine);
    foretell: the prediction (default: `predict` from the first three).
    """
    failed = [check for check in launch.checks if not check.passed]
    if failed:
        raise InputError(f"pre-flight: {failed[0].name.lower()}: {failed[0].text}")
    with _alone():
        write_spec(folder, launch.spec, launch.workloads)
        (start or _torchrun)(launch, folder, stop, report)
    return read_run(launch, folder, foretell)


def read_run(launch: Launch, folder: Path, foretell: Foretell | None = None) -> Run:
    """What the ranks of a launch left in its folder. Raises InputError when their outcome is not the unplanned one's."""
    outcome = json.loads((folder / REPORT).read_text())
    tolerance = TOLERANCE[launch.spec.model.dtype]
    for plan, difference in zip(launch.spec.plans, outcome["differences"], strict=True):
        # Written so that a NaN, which compares false, fails too.
        if not difference <= tolerance:
            raise InputError(
                f"what {plan.name} computed differs from the unplanned computation by {difference:.2g} of its largest "
                f"number (allowed: {tolerance:g}); the run is not valid"
            )
    points = json.loads((folder / CALIBRATION).read_text())
    profile = fit_profile(points, outcome["device"], launch.spec, len(os.sched_getaffinity(0)))
    runs = []
    passes = measured_timelines(folder, launch.spec.ranks, len(launch.spec.plans), outcome["device"])
    for given, plan, timelines, difference in zip(
        launch.plans, launch.spec.plans, passes, outcome["differences"], strict=True
    ):
        totals = tuple(timeline.total for timeline in timelines)
        middle = int(np.argsort(totals)[len(totals) // 2])
        predicted = predict(launch, plan, profile) if foretell is None else foretell(launch, plan, profile, points)
        runs.append(Measured(given, predicted, timelines[middle], totals, difference))
    return Run(
        tuple(runs), outcome["device"], launch.workloads[0].tokens, profile, outcome["clock_error"]
    )  # fmt: skip


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the data folder's only place for a launch: two at once would measure each other. The system gives it up when
    the process ends, however it ends. Raises InputError when another launch is running."""
    with (data_folder() / "launch.lock").open("w") as place:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("another launch is running on this machine; wait for it or stop it") from None
        yield


def _torchrun(launch: Launch, folder: Path, stop: Stop, report) -> None:
    commands = [(launch.command(folder), {"GLOO_SOCKET_IFNAME": "lo"})]
    run_processes(commands, launch.spec.ranks, launch.limit, folder, stop, report)
