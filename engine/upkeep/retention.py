"""Cleaning of the data folder. The policy, which docs/operating.md states for people:

* data that the team's database refers to stays: recordings of saved plans, verdicts on them, launches that were noted;
* a session goes when nobody has opened or changed it for so many days, a job when it ended as long ago and no session
  that stays has it, a file when nothing that stays names it and it was saved as long ago;
* timelines and figures can be simulated again and go by the last time that a page showed them; the remains of killed
  processes go after two days;
* if the folder is larger than the operator wants, the days are halved until the rest fits, down to one day.

It may run while studios do: everything was looked at a moment ago, and is looked at again before it goes. References
    (digests and ids of jobs) are found by their look, not by their fields: a reference that some other version wrote
    counts too.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sqlalchemy import select

from engine.errors import InputError
from engine.jobs import queue, runner
from engine.jobs.protocol import REQUEST
from engine.store import alone_with_sessions, tables
from engine.store.database import Database
from engine.units import SIZE
from engine.upkeep.health import KINDS, LEFT_BEHIND, LEFTOVERS, files_under

NAMED = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])|\d{8}T\d{12}-[0-9a-f]{8}", re.ASCII)
"""A digest, or the id of a job."""

DAYS, ROOM = "SWITCHYARD_KEEP_DAYS", "SWITCHYARD_KEEP_SIZE"
"""Environment variables: the unused days after which data goes, and the largest size of the folder (unset: no limit)."""

USUAL_DAYS = 90
DAY = 24 * 3600.0
LEFT_DAYS = 2
DRAFT = re.compile(r"\..+\.([0-9a-f]{8}|going)|.+\.partial")
"""Name of a file while it is written or removed."""

NAMED_FOLDERS = ("workloads", "documents", "configs")
"""Folders with files that others name by their digest."""

SIMULATED_FOLDERS = ("timelines", "figures")


@dataclass(frozen=True)
class TeamsWork:
    """References of the team's database.

    names: digests and ids of jobs
    plans: ids of the saved plans
    """

    names: frozenset[str]
    plans: frozenset[str]


def named_in(text: str) -> frozenset[str]:
    """Every digest and every id of a job in a text."""
    return frozenset(NAMED.findall(text))


def named_in_file(path: Path) -> frozenset[str]:
    """The same of a file; nothing if it is gone."""
    try:
        at = path.stat()
        return _named_in_file(path, at.st_mtime_ns, at.st_size)
    except FileNotFoundError:
        return frozenset()


@lru_cache(maxsize=4096)
def _named_in_file(path: Path, written: int, size: int) -> frozenset[str]:
    return named_in(path.read_text(encoding="utf-8", errors="replace"))


def teams_work(db: Database) -> TeamsWork:
    """The inputs of saved plans, and the launches that were noted. Raises InputError if the database does not answer:
    data that is not known to be free stays."""
    names: set[str] = set()
    plans: set[str] = set()
    with db.reading() as connection:
        for plan, inputs in connection.execute(select(tables.saved_plan.c.plan, tables.saved_plan.c.inputs)):
            plans.add(plan)
            names |= named_in(json.dumps(inputs))
        for (run,) in connection.execute(select(tables.run.c.id)):  # the id of its job, and which of its plans it was
            names |= named_in(run)
    return TeamsWork(frozenset(names), frozenset(plans))


@dataclass(frozen=True)
class Policy:
    """The policy of an operator.

    days: unused days after which data goes
    room: bytes that the data folder may take, None: any
    """

    days: int = USUAL_DAYS
    room: float | None = None


@dataclass(frozen=True)
class Going:
    """Data that goes.

    size: bytes
    used: seconds since the epoch of its last use
    """

    kind: str
    path: Path
    size: int
    used: float


@dataclass(frozen=True)
class Cleaning:
    """The data that goes after so many days. stays: bytes of the data folder that are left."""

    days: int
    going: tuple[Going, ...]
    stays: int


def policy() -> Policy:
    """The policy that the environment names. Raises InputError if it is no such number."""
    days, room = (os.environ.get(name, "").strip() for name in (DAYS, ROOM))
    if days and (not days.isdecimal() or int(days) < 1):
        raise InputError(f"{DAYS} is '{days[:40]}'; give a whole number of days, 1 or more")
    return Policy(int(days) if days else USUAL_DAYS, _bytes(room) if room else None)


def _bytes(text: str) -> float:
    units = {name: factor for factor, name in SIZE}
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?B)", text)
    if parts is None:
        raise InputError(f"{ROOM} is '{text[:40]}'; give a size such as 50GB")
    return float(parts[1]) * units[parts[2]]


def clean(db: Database, folder: Path, policy: Policy, now: float, remove: bool) -> Cleaning:
    """The data that goes from a data folder by the policy at a time (seconds since the epoch), and with `remove` is
    gone. Raises InputError if the database does not answer or something cannot be removed."""
    work = teams_work(db)
    days, everything = policy.days, sum(size for _, size in files_under(folder))
    while True:
        going = tuple(_Walk(folder, work, now - days * DAY, now - LEFT_DAYS * DAY).all())
        stays = everything - sum(part.size for part in going)
        if policy.room is None or stays <= policy.room or days == 1:
            break
        days = max(1, days // 2)
    if remove:
        going = tuple(_Walk(folder, work, now - days * DAY, now - LEFT_DAYS * DAY, _remove).all())
        stays = everything - sum(part.size for part in going)
    return Cleaning(days, going, stays)


@dataclass(frozen=True)
class _Walk:
    """One look through a data folder.

    before: data last used before this time goes
    left: remains from before this time go
    take: removes a part and returns true if it has, so that data used at the last moment stays with all that it names
    """

    folder: Path
    work: TeamsWork
    before: float
    left: float
    take: Callable[[Going], bool] = lambda going: True

    def all(self) -> Iterator[Going]:
        """Yield the parts that go, each taken as it is yielded: first those that refer to others."""
        named = set(self.work.names)
        for path in _children(self.folder / "sessions"):
            session = _file("sessions", path)
            if path.suffix != ".json" or session is None:
                continue
            if session.used < self.before and self.take(session):
                yield session
            else:
                named |= named_in_file(path)
        queued = set(queue.everybody(self.folder / "jobs"))
        for job in runner.folders(self.folder):
            part = self._job(job, job.folder in queued or job.id in named)
            if part is not None and self.take(part):
                yield part
            else:
                named |= named_in_file(job.folder / REQUEST)
        for name in (*NAMED_FOLDERS, *SIMULATED_FOLDERS):
            for path in _children(self.folder / name):
                part = _file(name, path)
                free = part is not None and path.stem not in named and not DRAFT.fullmatch(path.name)
                if free and part.used < self.before and self.take(part):
                    yield part
        yield from (part for part in self._left_behind() if part.used < self.left and self.take(part))

    def _job(self, job: runner.Job, needed: bool) -> Going | None:
        """The job, if it may go."""
        try:
            if needed or not job.state.finished:
                return None
            if job.request.kind == "verdict" and job.request.arguments.get("plan_id") in self.work.plans:
                return None
        except (InputError, FileNotFoundError, json.JSONDecodeError):
            pass  # it is being made, or of no version that is known
        part = _tree(KINDS["jobs"], job.folder)
        return part if part.used < self.before else None

    def _left_behind(self) -> Iterator[Going]:
        for path in _children(self.folder):
            if path.name.startswith(LEFT_BEHIND):
                yield _tree(LEFTOVERS, path)
        for name in (*NAMED_FOLDERS, *SIMULATED_FOLDERS, "sessions"):
            for path in _children(self.folder / name):
                if DRAFT.fullmatch(path.name) and (part := _file(name, path)) is not None:
                    yield Going(LEFTOVERS, path, part.size, part.used)
        for path in _children(self.folder / "jobs"):
            if DRAFT.fullmatch(path.name):
                yield _tree(LEFTOVERS, path)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _file(folder: str, path: Path) -> Going | None:
    """A file that may go; None if it is gone, or no file."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return Going(KINDS[folder], path, about.st_size, about.st_mtime) if path.is_file() else None


def _tree(kind: str, folder: Path) -> Going:
    """A folder with all its files, by the newest of them; or a file."""
    about = folder.stat()
    size, used = about.st_size if folder.is_file() else 0, about.st_mtime
    for path, bytes_there in files_under(folder):
        size += bytes_there
        try:
            used = max(used, path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return Going(kind, folder, size, used)


def _remove(going: Going) -> bool:
    """Remove something, unless it was used since the last look. It is renamed first, so that nobody begins to use it
    between that look and its end: its next writer then writes it anew."""
    path = going.path
    aside = path.with_name(f".{path.name}.going")
    alone = alone_with_sessions() if going.kind == KINDS["sessions"] else contextlib.nullcontext()
    try:
        with alone:
            if path.is_file() and path.stat().st_mtime > going.used:
                return False
            path.rename(aside)
            if aside.is_dir():
                shutil.rmtree(aside)
            elif aside.stat().st_mtime > going.used and not path.exists():
                aside.rename(path)
                return False
            else:
                aside.unlink()
            return True
    except FileNotFoundError:  # somebody else cleans too
        return False
    except OSError as error:
        raise InputError(f"{path} cannot be removed: {error.strerror or error}") from None
