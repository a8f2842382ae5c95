"""Processes on this machine: of a crew for one study, or of a pool for as long as this process lives.

They are forked from a server that is started for it, with the modules that they need imported once for all: a fork of
this process would copy the locks that the threads of PyTorch, Arrow or a solver hold at that moment and wait for them
for ever, and a process started from nothing would import everything again for each processor.
"""

import contextlib
import ctypes
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import psutil

from engine.parallel.crew import GRACE, Batch
from engine.program import environment

_CONTEXT = multiprocessing.get_context("forkserver")
_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
"""There is a process for every processor; threads beyond that wait for one another in busy loops."""


def leave_with_parent() -> None:
    """End this process, even a suspended one, when the one that started it is gone: ranks of torchrun, for one, have sessions
    of their own, and nobody else would end them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG


def ask(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this program with these arguments in another process, for libraries that this one had better not keep. It
    should call `leave_with_parent` first."""
    return subprocess.run([sys.executable, "-m", module, *words], env=environment(), capture_output=True, text=True)


def processors() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def workers_for(points: int) -> int:
    """Number of processes to start: one a processor, but no more than fit the memory if each takes as much as this one did."""
    return max(1, min(processors(), points, int(psutil.virtual_memory().available / most_memory())))


def most_memory() -> int:
    """Most bytes that this process has taken. `getrusage` on Linux also counts the memory of the process that started
    this one until then, such as a studio's for its jobs."""
    with contextlib.suppress(OSError, TypeError):
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def prepare(module: str) -> None:
    """Start the server and wait until it can fork; `module` and all its imports are there in every process. Takes as
    long as these imports, and no time if it was called before."""
    _CONTEXT.set_forkserver_preload([module, __name__])
    resource_tracker.ensure_running()  # here, for it would lift the ban on signals
    with _untouched_by_signals(), _environment():
        forkserver.ensure_running()
    first = _CONTEXT.Process(target=_nothing)
    first.start()
    first.join()


def give_up_preparing() -> None:
    """End a server that is still importing, which would notice only afterwards that nobody waits for it; `prepare`, in
    another thread, raises EOFError or OSError."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                child.kill()


@contextlib.contextmanager
def _untouched_by_signals() -> Iterator[None]:
    """Processes started inside leave Ctrl-C and a SIGTERM to the process group to this process, which knows the data to
    keep."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """The environment of the server, which reads it before any later change, and does not know this process's path."""
    wanted = _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(sys.path)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class Workers:
    """An executor of processes that leave the signals of this one to it, and end when it closes them or dies. `prepare`
    comes first.

    begin: called in every process before its first work, with `arguments`
    """

    def __init__(self, count: int, begin: Callable[..., None], *arguments: Any) -> None:
        self._context = _RememberingContext()
        # Readers learn that this process asks to stop, and also that it died.
        self._reader, self._writer = self._context.Pipe(duplex=False)
        own = (self._reader, begin, arguments)
        self.executor = ProcessPoolExecutor(count, self._context, _begin, own)

    def ask_to_stop(self) -> None:
        self._writer.close()

    def check(self) -> None:
        """End all processes once one of them has died: an executor that has read half of its answer would wait for the rest."""
        if not all(process.is_alive() for process in self._context.started):
            self._kill()

    def _kill(self) -> None:
        for process in self._context.started:
            process.kill()
            process.join()
        for answers in self._context.answers:  # the end of a half-sent answer comes when nobody could write any more
            answers._writer.close()

    def close(self) -> None:
        """End the processes, at work or not. Harmless to repeat."""
        self.ask_to_stop()
        self._kill()
        # Waits for its thread, which would otherwise give its semaphores back while the interpreter may be ending.
        self.executor.shutdown(wait=True, cancel_futures=True)
        self._reader.close()


class _RememberingContext(ForkServerContext):
    """A context that remembers its processes and queues, which an executor does not tell.

    started: the processes that were started in it
    answers: the queue that they write to
    """

    def __init__(self) -> None:
        self.started: list[multiprocessing.process.BaseProcess] = []
        self.answers: list[SimpleQueue] = []

    def SimpleQueue(self) -> SimpleQueue:  # noqa: N802
        self.answers.append(ForkServerContext.SimpleQueue(self))
        return self.answers[-1]

    def Process(self, *arguments: Any, **options: Any) -> multiprocessing.process.BaseProcess:  # noqa: N802
        process = ForkServerContext.Process(*arguments, **options)
        self.started.append(process)
        return process


class Processes(Workers):
    """A crew of processes on this machine, see `Crew`. `prepare` comes first."""

    lost = (BrokenProcessPool,)
    advice = "processes of this machine were killed again and again, perhaps for want of memory; make the study smaller"

    def __init__(self, batch: Batch, points: int) -> None:
        super().__init__(workers_for(points), _take, batch)

    def submit(self, index: int) -> Future:
        return self.executor.submit(_do, index)


_stop_asked = threading.Event()
_batch: Batch


def _begin(reader: Connection, begin: Callable[..., None], arguments: tuple) -> None:
    """The first thing that a process does."""
    os.setpgid(0, 0)  # not in the group of the job or the terminal, whose signals are not for it ...
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # ... but its executor's are
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()
    begin(*arguments)


def _watch(reader: Connection) -> None:
    """Wait until the process that started this one closes its end or dies, and do not outlive it by much."""
    with contextlib.suppress(EOFError, OSError):
        reader.recv_bytes()
    _stop_asked.set()
    time.sleep(2 * GRACE)
    os._exit(1)


def _take(batch: Batch) -> None:
    global _batch
    _batch = batch


def _do(index: int) -> Any:
    return _batch.do(index, _stop_asked.is_set)


def _nothing() -> None:
    """The work of the first process: it is there."""
