"""The living processes of a launch, and waiting for them."""

import contextlib
import os
from pathlib import Path

import psutil

from engine.jobs import protocol
from engine.launch.running.processes import WORKER


def processes_of(folder: Path) -> list[psutil.Process]:
    """Living processes that name the folder on their command line or in their environment."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and any(str(folder) in word for word in words) and protocol.is_alive(process):
                processes.append(process)
    return processes


def ranks_of(folder: Path) -> list[psutil.Process]:
    """The living ranks of a launch, without its torchrun."""
    ranks = []
    for process in processes_of(folder):
        with contextlib.suppress(psutil.Error):
            if "RANK" in process.environ():
                ranks.append(process)
    return ranks


def workers_of(folder: Path) -> list[psutil.Process]:
    """The living ranks of a launch."""
    ranks = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if {WORKER, str(folder)} <= set(process.cmdline()) and protocol.is_alive(process):
                ranks.append(process)
    return ranks


def workers() -> list[psutil.Process]:
    """The processes of pools, of which there are none but in the midst of a study. Forked by the server, not by this one."""
    forked = []
    for server in servers():
        with contextlib.suppress(psutil.Error):  # it has ended since
            forked += filter(protocol.is_alive, server.children())
    return forked


def servers() -> list[psutil.Process]:
    """The children that have forked processes for this one; others may be those of other tests, such as a browser."""
    mine = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                mine.append(child)
    return mine


def left(mark: str) -> list[psutil.Process]:
    """The processes with the mark of a test in their environment."""
    mine = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SWITCHYARD_TEST_ORPHANS") == mark and process.status() != psutil.STATUS_ZOMBIE:
                mine.append(process)
        except psutil.Error:
            continue
    return mine
