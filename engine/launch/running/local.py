"""Ranks on this machine: by torchrun, or on the emulated links of a testbed."""

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.errors import InputError
from engine.launch.preparation.prepared import PreparedLaunch
from engine.launch.rank.instructions import write_instructions, writing
from engine.launch.results.run import Run, read_run
from engine.launch.running.processes import WORKER, commands_of, run_processes
from engine.result import Stop
from engine.store import data_folder


def run_here(launch: PreparedLaunch, folder: Path, stop: Stop, report) -> Run:
    """Run a launch in `folder` and read its measurements; a testbed exists for as long as its ranks run. Raises InputError
    when it fails or is stopped, with the reason; what the ranks printed is on standard output, which a job keeps as its log."""
    launch.check()
    ranks = launch.instructions.ranks
    with alone(), launch.testbed or contextlib.nullcontext():
        write_instructions(folder, launch.instructions, launch.workloads)
        commands = commands_of(WORKER, ranks, folder, launch.testbed)
        run_processes(commands, ranks, launch.limit, folder, stop, report)
    return read_run(launch, folder)


def command_of(launch: PreparedLaunch, folder: Path) -> list[str]:
    """The exact command as an argument list, in a testbed that of rank 0. Raises InputError where the machine lacks what a
    testbed needs."""
    arguments, _ = commands_of(WORKER, launch.instructions.ranks, folder, launch.testbed)[0]
    return list(arguments)


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
