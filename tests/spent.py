"""Processor seconds of the tests and of the processes that they start, and the processes that they forget."""

import contextlib
import os
import resource
import time
from pathlib import Path

import psutil

RUN = "SWITCHYARD_TEST_RUN"
"""An environment variable that all processes of a run inherit; its value is the id of the one that began it."""
ENDED = "SWITCHYARD_TEST_ENDED"
"""An environment variable: the file to which `tests.warm` adds the seconds of every process of its own that ended."""
SPARED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Helpers of Python's own that end with the process they serve."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
"""Environment of every test process: NumPy and PyTorch read it when they are loaded. There are as many test processes as
processors, and threads beyond that wait for one another in busy loops: an eigenvalue problem of 80 rows takes ten times as
long. Launches tell their ranks a number of threads, and the rank that computes what one process computes takes all cores: the
limit holds for those."""
GRACE = 5
"""Seconds that a process has to end after the last test."""


def loop_seconds() -> float:
    """Processor seconds of a loop over 20 million numbers, the unit in which recorded seconds and budgets are given."""
    begun = time.process_time()
    sum(number for number in range(20_000_000))
    return time.process_time() - begun


def so_far() -> float:
    """Processor seconds of this process and all its descendants since it began, but for what the warm process imports."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    total = sum(usage.ru_utime + usage.ru_stime for usage in (own, ended))
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.children_user + times.children_system
            if "tests.warm" not in process.cmdline():
                total += times.user + times.system
    with contextlib.suppress(OSError):
        total += sum(map(float, Path(os.environ.get(ENDED, "")).read_text().split()))
    return total


def left_over() -> list[str]:
    """The command lines of processes that tests of this run started and did not end."""
    run, begun = os.environ[RUN], time.monotonic()
    while (found := _living(run)) and time.monotonic() < begun + GRACE:
        time.sleep(0.1)
    return found


def _living(run: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            words = " ".join(process.cmdline())
            if process.environ().get(RUN) == run and not any(name in words for name in SPARED):
                found.append(f"{process.pid}: {words[:200]}")
    return found
