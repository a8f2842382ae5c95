"""Starts, finds, watches and cancels jobs: long work, each in a process of its own.

A job is a folder (see `engine.jobs.protocol`). Its state is derived from the files there and from the life of its worker, never
stored: it is the same for every page, after a reload, and for a server that was started after the job. Ending a job ends its
processes: the worker, its descendants, and those that have outlived the parent that linked them to it.
"""

import contextlib
import functools
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import psutil
from filelock import FileLock
from pydantic import JsonValue

from engine.errors import InputError
from engine.files import PRIVATE_FILE, make_folder, mark, tail, write_atomically
from engine.jobs import protocol, queue, workers
from engine.jobs.protocol import Progress, Request
from engine.logs import OURS
from engine.schema import json_text


def processes_of(folder: Path, known: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """The living processes of a job: `known`, the worker, whatever carries the mark, and all their descendants."""
    worker = protocol.living_worker(folder)
    processes = {*known, worker} if worker is not None else set(known)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(workers.MARK) == str(folder):
                processes.add(process)
    for process in list(processes):
        with contextlib.suppress(psutil.Error):
            processes.update(process.children(recursive=True))
    return [process for process in processes if protocol.is_alive(process)]


def kill_after(folder: Path, processes: list[psutil.Process], grace: float) -> None:
    """Leave `processes` and whatever belongs to the job `grace` seconds to end by themselves."""
    # psutil's own waiting would reap the worker and so take its exit code from the thread that writes it down.
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(protocol.is_alive(process) for process in processes):
        time.sleep(0.02)
    kill(folder, processes)


def kill(folder: Path, processes: list[psutil.Process]) -> None:
    """End `processes` and whatever belongs to the job, at once."""
    for _ in range(5):  # again, for processes that were forked between the look and the blow
        processes = processes_of(folder, processes)
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


ID = re.compile(r"\d{8}T\d{12}-[0-9a-f]{8}", re.ASCII)

GRACE = 1.6
"""Seconds that a job is given to stop by itself, with the best that it has. People are promised an end within two, and on a
busy machine it takes some tenths to find all processes of a job and end them."""

_LOG = logging.getLogger(f"{OURS}.jobs")
_unreaped: set[Path] = set()  # jobs started by this process, their end not noted yet


class State(StrEnum):
    STARTING = "starting"
    WAITING = "waiting"
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def finished(self) -> bool:
        """True if the job has come to its end, so that nothing about it will change."""
        return self in (State.DONE, State.CANCELLED, State.FAILED)


@dataclass(frozen=True)
class Job:
    """One job, by its folder. Every property reads the files anew."""

    id: str
    folder: Path

    @property
    def state(self) -> State:
        """The state, from the files and the processes as they are now."""
        # Liveness first: the files of a dead worker can no longer change while they are being read.
        noted = self._has(protocol.PID)
        alive = self.folder in _unreaped or protocol.lives(self.folder)
        if alive or (not noted and queue.may_be_starting(self.started)):
            if self._has(protocol.CANCELLED):
                return State.CANCELLING
            if not noted:
                return State.STARTING
            return State.WAITING if queue.waits(self.folder) else State.RUNNING
        if self._has(protocol.FINAL):
            return State.DONE
        return State.CANCELLED if self._has(protocol.CANCELLED) else State.FAILED

    @property
    def ahead(self) -> int:
        """The number of jobs that wait before this one, while it waits."""
        return queue.ahead_of(self.folder)

    @property
    def request(self) -> Request:
        """The question. Raises InputError if it is damaged. Not to be changed: others share it."""
        path = self.folder / protocol.REQUEST
        try:
            about = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from None
        return _request(path, about.st_mtime_ns, about.st_size)

    @property
    def progress(self) -> Progress | None:
        """The latest report."""
        return protocol.latest_progress(self.folder)

    @property
    def history(self) -> list[Progress]:
        """Every report, oldest first."""
        return protocol.read_progress(self.folder)

    @property
    def result(self) -> dict[str, JsonValue] | None:
        """The result: the final one of a job that is done, otherwise the best that was kept so far. Raises InputError where it
        is damaged."""
        return protocol.read_result(self.folder) if self._has(protocol.RESULT) else None

    @property
    def result_written(self) -> int | None:
        """When the result was last written, in nanoseconds since the epoch; None while there is none."""
        try:
            return (self.folder / protocol.RESULT).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    @property
    def error(self) -> str | None:
        """One line that says why the job failed; None unless it did."""
        if self.state is not State.FAILED:
            return None
        if self._has(protocol.ERROR):
            try:
                return protocol.Failure.from_json(_read(self.folder / protocol.ERROR), protocol.ERROR).message
            except InputError as error:
                return f"why it failed cannot be read: {error}"
        if not self._has(protocol.EXIT):
            return "the process is gone"
        try:
            code = int(_read(self.folder / protocol.EXIT)[:20])
        except ValueError:  # an InputError too
            return f"the process is gone, and its {protocol.EXIT} code cannot be read"
        if code < 0:
            return f"the worker was killed by signal {-code}"
        return f"the worker ended with exit code {code}"

    @property
    def started(self) -> float:
        """When the job was started, in seconds since the epoch."""
        return self.request.created

    @property
    def finished(self) -> float | None:
        """When the job wrote its last file, in seconds since the epoch; None while it runs."""
        if not self.state.finished:
            return None
        # Hidden files are drafts that another process may be renaming at this moment.
        return max(path.stat().st_mtime for path in self.folder.iterdir() if not path.name.startswith("."))

    @property
    def elapsed(self) -> float:
        """Seconds from the start to the end, or to now."""
        finished = self.finished
        return max(0.0, (time.time() if finished is None else finished) - self.started)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines the worker and its children printed."""
        return "\n".join(tail(self.folder / protocol.LOG).decode(errors="replace").splitlines()[-lines:])

    def _has(self, name: str) -> bool:
        return (self.folder / name).exists()


def start(
    kind: str,
    arguments: dict[str, JsonValue],
    root: Path,
    module: str = workers.WORKER,
    queued: bool = True,
    handed: bytes | None = None,
) -> Job:
    """Start a job in a new folder under `root`/jobs; `module` is the worker to run. Raises InputError if it cannot.

    queued: it waits for its turn (see `engine.jobs.queue`); False for a job that only watches work elsewhere
    handed: the part of the question that is kept nowhere, see `Context.handed`
    """
    now = datetime.now(UTC)
    id = f"{now:%Y%m%dT%H%M%S%f}-{secrets.token_hex(4)}"
    folder = root.resolve() / "jobs" / id
    request = Request(kind=kind, arguments=arguments, created=now.timestamp())
    text = json_text(request.model_dump())
    try:
        make_folder(folder)
        write_atomically(folder / protocol.REQUEST, text)
        if queued:
            queue.join(folder)
        _begin(module, folder, handed)
    except OSError as error:
        queue.leave(folder)
        shutil.rmtree(folder, ignore_errors=True)
        raise InputError(f"the job cannot be started in {folder}: {error.strerror or error}") from None
    _LOG.info("a job was started", extra={"job": id, "kind": kind})
    return Job(id, folder)


def resume(root: Path, module: str = workers.WORKER) -> list[Job]:
    """Start the jobs again that waited for their turn when the machine or the container went down; those that had begun have
    failed. For a studio that starts; several may at once."""
    resumed = []
    for folder in queue.everybody(root.resolve() / "jobs"):
        with contextlib.suppress(InputError, OSError), FileLock(folder / protocol.RESUMED, mode=PRIVATE_FILE):
            job = Job(folder.name, folder)
            if not job.state.finished:
                continue
            if any((folder / end).exists() for end in (protocol.CANCELLED, protocol.FINAL, protocol.ERROR, protocol.EXIT)):
                queue.leave(folder)
                continue
            _begin(module, folder)
            resumed.append(job)
    return resumed


def _begin(module: str, folder: Path, handed: bytes | None = None) -> None:
    """Start the process of a job with a ready folder; OSError when that cannot be, and then there is none."""
    process = None
    _unreaped.add(folder)
    try:
        process = workers.start(module, folder, handed)
        with contextlib.suppress(psutil.NoSuchProcess):
            # The worker notes itself too, but may die before it gets there.
            protocol.write_pid(folder, process.pid)
    except OSError:
        if process is not None:
            process.kill()
            process.wait()
        _unreaped.discard(folder)
        raise
    # A daemon: the job goes on when the server ends.
    threading.Thread(target=_reap, args=(process, folder), name=f"reap {folder.name}", daemon=True).start()


def find(id: str, root: Path) -> Job:
    """The job with this id under `root`; raises InputError when there is none, and if its question is damaged."""
    folder = root.resolve() / "jobs" / id if ID.fullmatch(id) else None
    if folder is None or not (folder / protocol.REQUEST).is_file():
        raise InputError(f"there is no job {id[:40]!r}")
    job = Job(id, folder)
    _ = job.request
    return job


def folders(root: Path) -> list[Job]:
    """All folders under `root` that may be jobs, newest first, none of them read."""
    folder = root.resolve() / "jobs"
    paths = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
    return [Job(path.name, path) for path in paths if ID.fullmatch(path.name)]


def jobs(root: Path, kind: str | None = None) -> list[Job]:
    """All jobs under `root`, or those of one kind, newest first; one with an unreadable request is left out."""
    readable = []
    for job in folders(root):
        with contextlib.suppress(InputError):
            if kind in (None, job.request.kind):
                readable.append(job)
    return readable


def cancel(job: Job, grace: float = GRACE) -> None:
    """Ask the job to stop, and make it stop after `grace` seconds. Returns at once; harmless to repeat.

    Should the server be killed in between, the job shows as cancelling while it lives, and can be cancelled again.
    """
    if job.state.finished:
        return
    processes = processes_of(job.folder)  # now: once the worker is dead, nothing leads to its children
    with contextlib.suppress(OSError):  # on a full disk it is all the more important that the job ends
        mark(job.folder / protocol.CANCELLED)
    worker = protocol.living_worker(job.folder)
    if worker is not None:
        with contextlib.suppress(OSError):
            os.killpg(worker.pid, signal.SIGTERM)
    # Not a daemon: a server that shuts down in good order still ends what it was asked to end.
    threading.Thread(target=kill_after, args=(job.folder, processes, grace), name=f"cancel {job.id}").start()


def wait(job: Job, timeout: float) -> State:
    """Wait until the job has finished, at most `timeout` seconds; returns its state."""
    deadline = time.monotonic() + timeout
    while not (state := job.state).finished and time.monotonic() < deadline:
        time.sleep(0.02)
    return state


def remove(job: Job) -> None:
    """Delete a finished job with all its files; raises InputError when it still runs or cannot be deleted."""
    if not job.state.finished:
        raise InputError(f"job {job.id} is still {job.state}: cancel it first")
    kill(job.folder, [])
    try:
        # At once: of a folder that is half gone nobody could tell how the job stood.
        shutil.rmtree(job.folder.rename(job.folder.with_name(f".{job.id}")))
    except OSError as error:
        raise InputError(f"job {job.id} cannot be deleted: {error.strerror or error}") from None


def _reap(process: subprocess.Popen[bytes], folder: Path) -> None:
    try:
        code = process.wait()
        _LOG.info("a job has ended", extra={"job": folder.name, "code": code})
        with contextlib.suppress(OSError):
            write_atomically(folder / protocol.EXIT, str(code))
        queue.leave(folder)  # a worker that was killed while it waited has not
        kill(folder, [])  # a job's processes end with its worker, also when that was killed
    finally:
        _unreaped.discard(folder)
        workers.replace_standby()


@functools.lru_cache(maxsize=256)
def _request(path: Path, written: int, size: int) -> Request:
    """A request as it is on the disk now; pages ask for those of all jobs every second."""
    return Request.from_json(_read(path), f"job {path.parent.name}, {protocol.REQUEST}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be read: {error.strerror or error}")
