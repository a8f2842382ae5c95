"""The queue: so many jobs of a data folder at once, first come, first served.

A job waits in its own process, and holds a locked file while it works; the system unlocks it however the process ends. So the
queue needs nobody who outlives it, all studios on a data folder share it, and whoever died in it keeps nobody waiting.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from engine.errors import InputError
from engine.files import PRIVATE_FILE, make_folder, mark, write_atomically
from engine.jobs.protocol import PID, lives
from engine.result import Stop

JOBS = "SWITCHYARD_JOBS"
"""Environment variable: how many jobs run at once; unset: as many as there are processors."""

STARTING_LIMIT = 30.0  # seconds in which a job without a noted process may still be on its way
POLL = 0.2


def may_be_starting(since: float) -> bool:
    """True if a job without a noted process may still be on its way. since: when it was asked for, in seconds since the epoch;
    if the clock was set back, that is yet to come."""
    return abs(time.time() - since) < STARTING_LIMIT


def limit() -> int:
    """The number of jobs that may run at once. Raises InputError if `SWITCHYARD_JOBS` is no such number."""
    wanted = os.environ.get(JOBS, "").strip()
    if not wanted:
        return len(os.sched_getaffinity(0))
    if not wanted.isdecimal() or int(wanted) < 1:
        raise InputError(f"{JOBS} is '{wanted[:40]}'; give a whole number of jobs, 1 or more")
    return int(wanted)


def join(folder: Path) -> None:
    """Put the job of this folder at the end of the queue."""
    place = _place(folder)
    make_folder(place.parent)
    mark(place)


def leave(folder: Path) -> None:
    """Take the job out of the queue, where it need not be."""
    with contextlib.suppress(OSError):
        _place(folder).unlink(missing_ok=True)


def waits(folder: Path) -> bool:
    """True if the job's process has found that it is not its turn yet."""
    with contextlib.suppress(OSError):
        return _place(folder).stat().st_size > 0
    return False


def everybody(jobs: Path) -> list[Path]:
    """The folders of all jobs in the queue of this folder of jobs, the first first, also those that nobody works on."""
    queue = _place(jobs / "any").parent
    places = sorted(queue.iterdir()) if queue.is_dir() else []
    return [jobs / place.name for place in places if not place.name.startswith(".")]  # those are drafts


def ahead_of(folder: Path) -> int:
    """The number of jobs that wait before this one."""
    before = [other for other in everybody(folder.parent) if other.name < folder.name]
    return sum(_will_begin(other) for other in before)


@contextlib.contextmanager
def turn(folder: Path, stop: Stop) -> Iterator[bool]:
    """Wait until it is the job's turn and keep its place among the running ones inside; False where it was asked to stop
    before. A job that did not join the queue has its turn at once."""
    with contextlib.ExitStack() as kept:
        kept.callback(leave, folder)
        while _place(folder).exists():
            if stop():
                yield False
                return
            if ahead_of(folder) == 0 and (slot := _free_slot(folder.parent)) is not None:
                kept.callback(slot.release)
                leave(folder)
                break
            if not waits(folder):
                with contextlib.suppress(OSError):  # which only informs
                    write_atomically(_place(folder), "waits")
            time.sleep(POLL)
        yield True


def _place(folder: Path) -> Path:
    return folder.parent.parent / "queue" / "places" / folder.name


def _will_begin(folder: Path) -> bool:
    """True if a job in the queue will still take its turn: its process lives, or is just being started."""
    if lives(folder):
        return True
    with contextlib.suppress(OSError):
        return not (folder / PID).exists() and may_be_starting(_place(folder).stat().st_mtime)
    return False


def _free_slot(jobs: Path) -> FileLock | None:
    """A place among the running jobs, locked; None where all are taken."""
    slots = jobs.parent / "queue" / "slots"
    make_folder(slots)
    for number in range(limit()):
        slot = FileLock(slots / str(number), mode=PRIVATE_FILE)
        with contextlib.suppress(Timeout):
            slot.acquire(blocking=False)
            return slot
    return None
