"""Run a prepared launch at its destination: on this machine by torchrun, on the emulated links of a testbed, or by a cluster's
scheduler. A job on a cluster goes on even if this machine stops watching, and its results can be read from its run folder."""

import contextlib
import fcntl
import itertools
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from engine.errors import InputError, StoppedError
from engine.files import data_folder, make_folder, open_to_append, write_atomically
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.rank.failure import STANDING, RankProgress, Standing, log_of
from engine.launch.rank.instructions import INSTRUCTIONS, PROGRESS, write_instructions, writing
from engine.launch.results.run import Run, read_run
from engine.launch.running import clusters
from engine.launch.running.processes import WORKER, commands_of, run_processes
from engine.program import command
from engine.result import Stop

TEMPORARY, IN_USE = "run-", "in-use"
"""Prefix of the folders of launches that are kept nowhere, and the file in each that its process holds."""

POLL = 5.0
"""Seconds between two questions to a cluster's scheduler."""

PATIENCE = 1800.0
"""Seconds for which the scheduler may leave all questions unanswered, as during an update. The job goes on meanwhile."""

LINES = 2000
"""Most lines of a node's log that are kept."""


def run_here(launch: PreparedLaunch, folder: Path, stop: Stop, report) -> Run:
    """Run a launch in `folder` and read its measurements; a testbed exists for as long as its ranks run. Raises InputError if
    it fails or is stopped, with the reason; the ranks' output is on standard output, which a job keeps as its log."""
    launch.check()
    ranks = launch.instructions.ranks
    with alone(), launch.testbed or contextlib.nullcontext():
        write_instructions(folder, launch.instructions, launch.workloads, launch.profile)
        commands = commands_of(WORKER, ranks, folder, launch.testbed)
        try:
            run_processes(commands, ranks, launch.limit, folder, stop, report)
        finally:
            if launch.instructions.own is not None:  # of all that is written, they alone have the texts
                (folder / INSTRUCTIONS).unlink(missing_ok=True)
    return read_run(launch, folder)


def command_of(launch: PreparedLaunch, folder: Path) -> list[str]:
    """The exact command as an argument list, in a testbed that of rank 0. Raises InputError if the machine cannot build
    the testbed."""
    return list(commands_of(WORKER, launch.instructions.ranks, folder, launch.testbed)[0][0])


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A run folder in the data folder, for as long as it is needed. Those of launches that were killed go first."""
    with contextlib.ExitStack() as held:
        # One process at a time, so that none takes a folder for abandoned that another one is about to hold.
        with writing(where := data_folder()), open_to_append(where / "run.lock") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            # The system releases the locks of a launch that was killed.
            for path in where.glob(f"{TEMPORARY}*/{IN_USE}"):
                with contextlib.suppress(OSError), path.open("w") as use:
                    fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent, ignore_errors=True)
            # A folder that stays on a disk that became read-only must not hide why the launch failed.
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=where, ignore_cleanup_errors=True))
            use = held.enter_context(open_to_append(Path(folder) / IN_USE))
            fcntl.flock(use, fcntl.LOCK_EX)
        yield Path(folder)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the data folder's only place for a launch: two at once would measure each other. The system releases it when
    the process ends, however it ends. Raises InputError if another launch or a calibration is running."""
    with writing(folder := data_folder()):
        place = open_to_append(folder / "launch.lock")
    with place:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("another launch or calibration is running on this machine; wait for it or stop it") from None
        yield


def run_on_cluster(launch: PreparedLaunch, seen: Path, stop: Stop, report) -> Run:
    """Submit a launch, wait for its end and read its results. Raises InputError if it fails or is stopped, which also
    ends the job on the cluster.

    seen: the folder for the output of its nodes, as of the ranks of a launch here
    """
    make_folder(seen)
    nodes = launch.destination.nodes
    report(0.0, "writing the run folder", None, None)
    with clusters.new_run_folder(launch) as folder:
        handle = clusters.submit(launch, folder)
    print(f"submitted as {handle}; its run folder is {folder}", flush=True)
    status = _wait(handle, folder, nodes, seen, stop, report)
    _look(folder, nodes, seen)
    if status.state in ("failed", "cancelled"):
        raise InputError(clusters.failure(folder, status))
    return clusters.collect(folder)


def _wait(handle: str, folder: Path, nodes: int, seen: Path, stop: Stop, report) -> clusters.Status:
    """Ask for the job's state until it is over."""
    answered = time.monotonic()
    while True:
        if stop():
            try:
                clusters.cancel(handle)
            except InputError as error:
                raise StoppedError(
                    f"the launch was ended: stopped, but {handle} may go on, for it cannot be ended now: {error}"
                ) from None
            raise StoppedError(f"the launch was ended: stopped, and {handle} with it")
        try:
            status = clusters.status(handle)
        except InputError as error:
            if time.monotonic() - answered > PATIENCE:
                raise InputError(
                    f"{handle} may still run, but its scheduler cannot be asked: {error}; later, read its results by "
                    f"'{command()} collect {folder}'"
                ) from None
            report(None, f"{handle}: no answer ({error})", None, None)
        else:
            answered = time.monotonic()
            if status.over:
                return status
            first = _look(folder, nodes, seen)[0]
            doing = f", {first.message}" if first else ""
            report(first.done if first else 0.0, f"{handle} is {status.text}{doing}", None, None)
        until = time.monotonic() + POLL
        while time.monotonic() < until and not stop():
            time.sleep(0.1)


def _look(folder: Path, nodes: int, seen: Path) -> list[RankProgress | None]:
    """Copy the end of every node's output so far, and read each node's progress from it."""
    steps: list[RankProgress | None] = []
    for node in range(nodes):
        try:
            lines = list(deque(clusters.log_lines(folder, node), LINES))
        except InputError as error:
            lines = [f"({error})\n"]
        newest_first = (line.partition(PROGRESS)[2] for line in reversed(lines) if PROGRESS in line)
        steps.append(next(filter(None, map(RankProgress.read, itertools.islice(newest_first, 10))), None))
        write_atomically(log_of(seen, node), "".join(line if line.endswith("\n") else f"{line}\n" for line in lines))
    write_atomically(seen / STANDING, Standing(steps=tuple(steps)).to_json())
    return steps


def run(launch: PreparedLaunch, folder: Path, stop: Stop, report) -> Run:
    """Run a launch to its end and read its measurements: on this machine, in its testbed, or by its cluster's
    scheduler. Raises InputError if it fails or is stopped, with the reason.

    folder: its own; for a launch on a cluster the logs seen from here, as the run folder is in the destination's shared
        one
    report: called with progress as a job's
    """
    run_there = run_here if launch.destination is None else run_on_cluster
    return run_there(launch, folder, stop, report)
