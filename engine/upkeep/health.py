"""Whether a studio can work: room on its disk, a folder that it may write, a database that answers.

How much room the data folder takes, and for what.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.store import data_folder, database
from engine.store.database import FILE
from engine.units import size

KINDS = {
    "workloads": "recordings",
    "timelines": "timelines",
    "figures": "figures",
    "documents": "documents",
    "configs": "model configs",
    "sessions": "sessions",
    "jobs": "jobs",
    "queue": "queue",
}
"""What lies in each folder of the data folder. Documents: clusters, models, plans from files, steps and graphs.
Figures: of simulated plans."""
DATABASE, LEFTOVERS, OTHER = "database", "leftovers", "other"
LEFT_BEHIND = ("reading-", "run-", ".restoring-")
"""How folders begin in which something was being read, run or restored: what is left when its process was killed."""


@dataclass(frozen=True)
class Use:
    """Files of a kind and the bytes in them."""

    kind: str
    files: int
    bytes: int


def use_by_kind(folder: Path) -> list[Use]:
    """What takes room in a data folder, the most first."""
    found: dict[str, list[int]] = {}
    for path, taken in files_under(folder):
        found.setdefault(kind_of(path.relative_to(folder)), []).append(taken)
    uses = [Use(kind, len(sizes), sum(sizes)) for kind, sizes in found.items()]
    return sorted(uses, key=lambda use: (-use.bytes, use.kind))


def kind_of(path: Path) -> str:
    """The kind of a file; path: relative to the data folder."""
    top = path.parts[0]
    if top.startswith(LEFT_BEHIND):
        return LEFTOVERS
    if top.startswith(FILE):  # beside it SQLite keeps what was not merged yet
        return DATABASE
    return KINDS.get(top, OTHER) if len(path.parts) > 1 else OTHER


def files_under(folder: Path) -> Iterator[tuple[Path, int]]:
    """Every regular file below a folder with its size in bytes; what vanishes meanwhile is passed over, links are too."""
    for entry in _entries(folder):
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from files_under(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def free(folder: Path) -> tuple[int, int]:
    """Bytes that are free on the disk of a folder, and all that it has."""
    usage = shutil.disk_usage(folder)
    return usage.free, usage.total


LEAST_FREE = 256 * 1024**2
"""Bytes below which a disk counts as full: a launch writes as much."""


@dataclass(frozen=True)
class Check:
    """name: of what was looked at; well: whether it can be worked with; said: in a few words for people."""

    name: str
    well: bool
    said: str


def health() -> list[Check]:
    """What was found of the data folder and its disk, and of the database. It answers within seconds, and raises nothing."""
    return [_check("data folder", _folder), _check("database", lambda: f"{database.ask()} answers")]


def line(checks: list[Check]) -> str:
    """All of it in one line."""
    faults = [f"{check.name}: {check.said}" for check in checks if not check.well]
    return "; ".join(faults) if faults else "well: " + "; ".join(check.said for check in checks)


def _check(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except InputError as error:
        return Check(name, False, str(error))
    except OSError as error:
        return Check(name, False, error.strerror or str(error))


def _folder() -> str:
    folder = data_folder()
    left, everything = free(folder)
    said = f"{size(left)} free of {size(everything)}"
    if left < LEAST_FREE:
        raise InputError(f"its disk is full, {said}; python -m engine clean makes room")
    with tempfile.NamedTemporaryFile(dir=folder, prefix="reading-") as file:
        file.write(b"well")
        file.flush()
        os.fsync(file.fileno())
    return f"{folder} can be written, {said}"
