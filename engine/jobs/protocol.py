"""The files of a job's folder and how they are written: the only thing that the runner and the worker share.

Whoever can read the folder can tell how the job stands, so nothing else has to live as long as the job does.
"""

import contextlib
import functools
import json
import math
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, TypeVar

import psutil
from filelock import FileLock, Timeout
from pydantic import Field, ValidationError
from pydantic_core import to_json

from engine.errors import InputError
from engine.files import PRIVATE_FILE, append, mark, tail, write_atomically
from engine.schema import Frozen, Kept

REQUEST = "request.json"  # the question; a folder without it is not a job
PID = "pid"  # JSON: the worker's process id, when it started so that a recycled id is noticed, and on which machine
ALIVE = "alive"  # locked by the worker as long as it lives, which other machines can tell too
PROGRESS = "progress.jsonl"  # one Progress a line
LOG = "log.txt"  # the worker's standard output and standard error
CANCELLED = "cancelled"  # marker: somebody asked for the job to stop
RESULT = "result.json"  # the best result so far
FINAL = "final"  # marker: the result is the complete one
ERROR = "error.json"  # JSON: the message of the exception that ended the job
EXIT = "exit"  # the worker's exit code, known only where it was started
RESUMED = ".resumed"  # locked by the studio that looks whether a job must be started again
RESERVE = ".reserve"  # room on the disk for `ERROR` and `EXIT`, given up when the worker ends

VERSION = 1
"""The version of a result. Raise it when a key is renamed or means something else, and let readers mend the older ones. Results
of the first release have none."""

LOST_TEXTS = "the texts are kept nowhere, and the studio was started again before their turn: give them once more"
"""The fault of a job that was handed texts (`Context.handed`), and has been started again without them."""

Line = TypeVar("Line", bound=Frozen)

# The boot time is given in whole seconds and may tick over between the two readings that are compared.
START_TOLERANCE = 2.0


class Request(Kept):
    """A job's question. `arguments` is plain JSON; `created` is in seconds since the epoch."""

    kind: str
    arguments: dict[str, Any]
    created: float


class Worker(Frozen):
    """The process that works on a job.

    start: seconds since the machine booted
    machine: see `_machine`; None as noted by versions that knew only one
    """

    pid: int = Field(gt=0, lt=2**31)
    start: float
    machine: str | None = None

    @property
    def is_here(self) -> bool:
        """True if it is of this machine, so that its id means something."""
        return self.machine in (None, _machine())


class Failure(Frozen):
    """Why a job failed, in a line."""

    message: str


class Progress(Frozen):
    """One report of a running job: the share done, and the value and the proven limit of the best result so far. expected:
    seconds that all of the work was expected to take before it began, where that can be said."""

    time: float
    done: float | None = Field(default=None, ge=0, le=1)
    message: str = ""
    incumbent: float | None = None
    bound: float | None = None
    expected: float | None = None


def append_progress(folder: Path, progress: Progress) -> None:
    """Add one line."""
    append(folder / PROGRESS, f"{progress.to_json()}\n".encode())


def read_progress(folder: Path) -> list[Progress]:
    """Every whole report, oldest first; a line torn by a kill or a full disk is passed over."""
    try:
        return whole_lines(Progress, (folder / PROGRESS).read_bytes())
    except FileNotFoundError:
        return []


def first_progress(folder: Path) -> Progress | None:
    """The oldest report, without reading a long history; None before it is whole."""
    try:
        with (folder / PROGRESS).open("rb") as file:
            reports = whole_lines(Progress, file.readline())
    except FileNotFoundError:
        return None
    return reports[0] if reports else None


def latest_progress(folder: Path) -> Progress | None:
    """The newest whole report, without reading a long history."""
    reports = whole_lines(Progress, tail(folder / PROGRESS))
    return reports[-1] if reports else None


def whole_lines(kind: type[Line], text: bytes) -> list[Line]:
    """The documents of a text with one a line; a line that is torn or of another version is passed over."""
    documents = []
    for line in text.splitlines():
        with contextlib.suppress(ValidationError):
            documents.append(kind.model_validate_json(line))
    return documents


def write_pid(folder: Path, pid: int) -> None:
    """Note which process works on the job; raises psutil.NoSuchProcess when it has ended already."""
    worker = Worker(pid=pid, start=_start_since_boot(psutil.Process(pid)), machine=_machine())
    write_atomically(folder / PID, worker.to_json())


def _noted(folder: Path) -> Worker | None:
    """The process that was noted; None: none was, or the note is damaged."""
    with contextlib.suppress(OSError, InputError):
        return Worker.from_json((folder / PID).read_bytes(), PID)
    return None


def living_worker(folder: Path) -> psutil.Process | None:
    """The process of this machine that works on the job, or None when it is gone, was never noted or is elsewhere."""
    worker = _noted(folder)
    if worker is None or not worker.is_here:
        return None
    try:
        process = psutil.Process(worker.pid)
        same = abs(_start_since_boot(process) - worker.start) < START_TOLERANCE
    except psutil.Error:
        return None
    return process if same and is_alive(process) else None


def lives(folder: Path) -> bool:
    """True if some process works on the job, on whatever machine that shares the folder."""
    worker = _noted(folder)
    if worker is not None and worker.is_here:
        return living_worker(folder) is not None
    # Of another machine, or of one that nobody can tell any more: the system unlocks it however the process ends.
    if not (folder / ALIVE).exists():
        return False
    try:
        with FileLock(folder / ALIVE, mode=PRIVATE_FILE, blocking=False):
            return False
    except Timeout:
        return True
    except OSError:
        return False


@functools.cache
def _machine() -> str:
    """A name for all processes with comparable ids: those of one boot of a machine, and in it of one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def is_alive(process: psutil.Process) -> bool:
    """True if this very process still runs; a dead one that nobody has reaped yet does not."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _start_since_boot(process: psutil.Process) -> float:
    # Counted from boot because the time since the epoch moves when the clock is set.
    return process.create_time() - psutil.boot_time()


def read_result(folder: Path) -> dict[str, Any]:
    """The result, as the work gave it. Raises InputError where it is damaged, or of a version that is yet to come."""
    path = folder / RESULT
    try:
        result = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}); run the job again") from None
    version = result.pop("version", 1) if isinstance(result, dict) else None
    if type(version) is not int or version < 1:
        raise InputError(f"{path} is damaged (it is no result); run the job again")
    if version > VERSION:
        raise InputError(f"{path} was written by a later version of Switchyard; use that one, or run the job again")
    return result


def replace_result(folder: Path, result: Frozen) -> None:
    """Replace the answer of a job that has ended. Raises InputError if it cannot be written."""
    try:
        write_atomically(folder / RESULT, _as_text(result))
    except OSError as error:
        raise InputError(f"{folder / RESULT} cannot be written: {error.strerror or error}") from None


def _as_text(result: Frozen) -> bytes:
    """The result as JSON. `candidates` know their own text, see `PlanRow.text`: plans may have millions of sends."""
    rows = getattr(result, "candidates", ())
    known = bool(rows) and all(hasattr(row, "text") for row in rows)
    fields = result.model_dump(mode="json", exclude={"candidates"} if known else None)
    text = to_json({"version": VERSION, **fields}, inf_nan_mode="constants")
    return b'%b,"candidates":[%b]}' % (text[:-1], b",".join(row.text for row in rows)) if known else text


class Context:
    """The work's view of its job: where to write, when to stop, whom to tell. Safe to use from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stop = False
        self._closed = False
        self._lock = threading.Lock()

    def stop(self) -> bool:
        """Ask between steps; once True, return the best result so far within a second."""
        return self._stop

    def ask_to_stop(self) -> None:
        """Make `stop()` True. Takes no lock: a signal handler calls it."""
        self._stop = True

    def handed(self) -> bytes:
        """The part of the question that is kept nowhere, which the worker has as its standard input. Empty in a job that was
        started again after a restart, and where there is none."""
        return sys.stdin.buffer.read()

    def report(
        self,
        done: float | None,
        message: str,
        incumbent: float | None = None,
        bound: float | None = None,
        expected: float | None = None,
    ) -> None:
        """Tell how far the work is, see `Progress`. Call it at a pace that a person can follow; `inf` and `nan` count as
        unknown."""
        with contextlib.suppress(OSError):
            print(message, flush=True)  # the first thing to know of a worker that died is its last step
        share = _finite(done)
        progress = Progress(
            time=time.time(),
            done=None if share is None else min(max(share, 0.0), 1.0),
            message=message,
            incumbent=_finite(incumbent),
            bound=_finite(bound),
            expected=_finite(expected),
        )
        # Hours of work must not be lost because a line that only informs finds the disk full.
        with contextlib.suppress(OSError):
            append_progress(self.folder, progress)

    def keep(self, result: Frozen) -> None:
        """Store the best answer so far, so that it outlives a cancel, a crash or a kill."""
        self._store(result, closing=False)

    def finish(self, result: Frozen) -> None:
        """Store the answer that the work returned: the final one, or the best so far if it was asked to stop."""
        self._store(result, closing=True)

    def _store(self, result: Frozen, closing: bool) -> None:
        text = _as_text(result)
        with self._lock:
            if self._closed:  # a thread that was left behind must not overwrite the final result
                return
            write_atomically(self.folder / RESULT, text)
            if closing:
                # A polite signal from outside, such as a shutdown, leaves the same marker as the cancel button.
                mark(self.folder / (CANCELLED if self._stop else FINAL))
                self._closed = True


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
