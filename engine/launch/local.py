"""Run plans on this machine with torchrun, and read what they measured beside what was predicted."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.costs import CostProfile
from engine.errors import InputError
from engine.launch.compare import measured_timelines, unreadable
from engine.launch.prediction import fit_profile, predict
from engine.launch.prepare import Launch
from engine.launch.processes import run_processes
from engine.launch.spec import CALIBRATION, REPORT, TOLERANCE, write_spec, writing
from engine.plan import Plan
from engine.result import Stop
from engine.store import data_folder
from engine.timeline import Timeline


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


def run(launch: Launch, folder: Path, stop: Stop, report, start: Callable[..., None] | None = None) -> Run:
    """Run a prepared launch in `folder` and read its measurements. Raises InputError when it fails or is stopped, with
    the reason; what the ranks printed is on standard output, which a job keeps as its log.

    start: runs the ranks to their end, given launch, folder, stop and report (default: torchrun on this machine)
    """
    failed = [check for check in launch.checks if not check.passed]
    if failed:
        raise InputError(f"pre-flight: {failed[0].name.lower()}: {failed[0].text}")
    with alone():
        write_spec(folder, launch.spec, launch.workloads)
        (start or _torchrun)(launch, folder, stop, report)
    return read_run(launch, folder)


def read_run(launch: Launch, folder: Path, cores: int | None = None) -> Run:
    """What the ranks of a launch left in its folder. Raises InputError when their outcome is not the unplanned one's, and
    when a file is missing or torn.

    cores: processors of the machines that they ran on (default: of this one).
    """
    outcome = _left(folder / REPORT)
    tolerance = TOLERANCE[launch.spec.model.dtype]
    for plan, difference in zip(launch.spec.plans, outcome["differences"], strict=True):
        # Written so that a NaN, which compares false, fails too.
        if not difference <= tolerance:
            raise InputError(
                f"what {plan.name} computed differs from the unplanned computation by {difference:.2g} of its largest "
                f"number (allowed: {tolerance:g}); the run is not valid"
            )
    points = _left(folder / CALIBRATION)
    profile = fit_profile(points, outcome["device"], launch.spec, cores or len(os.sched_getaffinity(0)))
    runs = []
    passes = measured_timelines(folder, launch.spec.ranks, len(launch.spec.plans), outcome["device"])
    for given, plan, timelines, difference in zip(
        launch.plans, launch.spec.plans, passes, outcome["differences"], strict=True
    ):
        totals = tuple(timeline.total for timeline in timelines)
        middle = int(np.argsort(totals)[len(totals) // 2])
        predicted = predict(launch, plan, profile, points)
        runs.append(Measured(given, predicted, timelines[middle], totals, difference))
    return Run(tuple(runs), outcome["device"], launch.tokens, profile, outcome["clock_error"])


def _left(path: Path) -> dict[str, Any]:
    """What rank 0 wrote as JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A run folder in the data folder, for as long as it is needed."""
    with writing(where := data_folder()):
        # What cannot be removed from a disk that became read-only must not hide why the launch failed.
        folder = tempfile.TemporaryDirectory(prefix="run-", dir=where, ignore_cleanup_errors=True)
    with folder as path:
        yield Path(path)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the data folder's only place for a launch: two at once would measure each other. The system gives it up when
    the process ends, however it ends. Raises InputError when another launch or a calibration is
    running."""
    with writing(folder := data_folder()):
        place = (folder / "launch.lock").open("w")
    with place:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                "another launch or calibration is running on this machine; wait for it or stop it"
            ) from None
        yield


def _torchrun(launch: Launch, folder: Path, stop: Stop, report) -> None:
    commands = [(launch.command(folder), {"GLOO_SOCKET_IFNAME": "lo"})]
    run_processes(commands, launch.spec.ranks, launch.limit, folder, stop, report)
