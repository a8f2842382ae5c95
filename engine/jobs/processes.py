"""The processes of a job, its descendants and those that have outlived what linked them to it, and how they are ended."""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from engine.jobs.protocol import is_alive, living_worker

MARK = "SWITCHYARD_JOB"
"""Environment variable every process of a job inherits: finds those that outlived the parent that linked them to it."""


def processes_of(folder: Path, known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """The living processes of a job: `known`, the worker, whatever carries the mark, and all their descendants."""
    worker = living_worker(folder)
    processes = {*known, worker} if worker is not None else set(known)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == str(folder):
                processes.add(process)
    for process in list(processes):
        with contextlib.suppress(psutil.Error):
            processes.update(process.children(recursive=True))
    return [process for process in processes if is_alive(process)]


def kill_after(folder: Path, processes: list[psutil.Process], grace: float) -> None:
    """Leave `processes` and whatever belongs to the job `grace` seconds to end by themselves."""
    # psutil's own waiting would reap the worker and so take its exit code from the thread that writes it down.
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(is_alive(process) for process in processes):
        time.sleep(0.02)
    kill(folder, processes)


def kill(folder: Path, processes: list[psutil.Process]) -> None:
    """End `processes` and whatever belongs to the job, at once."""
    for _ in range(5):  # again, for what was forked between the look and the blow
        processes = processes_of(folder, processes)
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
