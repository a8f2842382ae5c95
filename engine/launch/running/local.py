"""Ranks on this machine: by torchrun, or on the emulated links of a testbed."""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.data_folder import data_folder
from engine.errors import InputError
from engine.files import open_to_append
from engine.launch.preparation.prepared import PreparedLaunch
from engine.launch.rank.instructions import write_instructions, writing
from engine.launch.results.run import Run, read_run
from engine.launch.running.processes import WORKER, commands_of, run_processes
from engine.result import Stop

TEMPORARY, IN_USE = "run-", "in-use"
"""How the folders of launches begin that are kept nowhere, and the file in each that its process holds."""


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
    """A run folder in the data folder, for as long as it is needed. Those of launches that were killed go first."""
    with contextlib.ExitStack() as held:
        # One process at a time, so that none takes a folder for abandoned that another one is about to hold.
        with writing(where := data_folder()), open_to_append(where / "run.lock") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            remove_abandoned(where)
            # What cannot be removed from a disk that became read-only must not hide why the launch failed.
            folder = held.enter_context(
                tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=where, ignore_cleanup_errors=True)
            )
            use = held.enter_context(open_to_append(Path(folder) / IN_USE))
            fcntl.flock(use, fcntl.LOCK_EX)
        yield Path(folder)


def remove_abandoned(where: Path) -> None:
    """Remove the run folders whose launch has ended without doing so: the system gives up what a killed process holds."""
    for path in where.glob(f"{TEMPORARY}*/{IN_USE}"):
        with contextlib.suppress(OSError), path.open("w") as use:
            fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the data folder's only place for a launch: two at once would measure each other. The system gives it up when
    the process ends, however it ends. Raises InputError when another launch or a calibration is
    running."""
    with writing(folder := data_folder()):
        place = open_to_append(folder / "launch.lock")
    with place:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                "another launch or calibration is running on this machine; wait for it or stop it"
            ) from None
        yield
