"""The living processes of a launch, waiting for them, and the clock of a slow machine."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.jobs import protocol
from engine.launch.running.processes import WORKER


def living(holds: Callable[[psutil.Process], bool], among: Iterable[psutil.Process] | None = None) -> list[psutil.Process]:
    """The living processes of which something holds; one that ends meanwhile is passed over. among: all if None"""
    found = []
    for process in psutil.process_iter() if among is None else among:
        with contextlib.suppress(psutil.Error, OSError):
            if holds(process) and protocol.is_alive(process):
                found.append(process)
    return found


def processes_of(folder: Path, variable: str | None = None) -> list[psutil.Process]:
    """Living processes that name the folder on their command line or in their environment. variable: that they have there"""

    def names_it(process: psutil.Process) -> bool:
        environment = process.environ()
        mine = any(str(folder) in word for word in [*process.cmdline(), *environment.values()])
        return mine and process.pid != os.getpid() and (variable is None or variable in environment)

    return living(names_it)


def ranks_of(folder: Path) -> list[psutil.Process]:
    """The living ranks of a launch, without its torchrun."""
    return processes_of(folder, "RANK")


def workers_of(folder: Path) -> list[psutil.Process]:
    """The living ranks of a launch."""
    return living(lambda process: {WORKER, str(folder)} <= set(process.cmdline()))


def workers() -> list[psutil.Process]:
    """The processes of pools, of which there are none but in the midst of a study. Forked by the server, not by this one."""
    forked = []
    for server in servers():
        with contextlib.suppress(psutil.Error):  # it has ended since
            forked += filter(protocol.is_alive, server.children())
    return forked


def servers() -> list[psutil.Process]:
    """The children that have forked processes for this one; others may be those of other tests, such as a browser."""
    return living(lambda child: "multiprocessing.forkserver" in " ".join(child.cmdline()), psutil.Process().children())


def left(mark: str) -> list[psutil.Process]:
    """The processes with the mark of a test in their environment."""
    return living(lambda process: process.environ().get("SWITCHYARD_TEST_ORPHANS") == mark)


@contextlib.contextmanager
def slow_machine(monkeypatch: pytest.MonkeyPatch, factor: float) -> Iterator[None]:
    """A clock that counts the seconds of this process's processors so many times, whatever other processes take of them."""
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: factor * time.process_time())
        yield
