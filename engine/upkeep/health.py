"""The health of a studio (room on its disk, a folder that it may write, a database that answers), and the use of its
data folder by kind."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.program import command
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
"""Contents of each folder of the data folder. Documents: clusters, models, plans from files, steps and graphs. Figures:
of simulated plans."""
DATABASE, LEFTOVERS, OTHER = "database", "leftovers", "other"
LEFT_BEHIND = ("reading-", "run-", ".restoring-")
"""Prefixes of folders in which something was being read, run or restored: the remains of a killed process."""

LEAST_FREE = 256 * 1024**2
"""Bytes below which a disk counts as full: a launch writes as much."""


@dataclass(frozen=True)
class Use:
    """Files of a kind and the bytes in them."""

    kind: str
    files: int
    bytes: int


def use_by_kind(folder: Path) -> list[Use]:
    """Use of a data folder by kind, the largest first."""
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
    if top.startswith(FILE):  # next to it SQLite keeps changes that are not merged yet
        return DATABASE
    return KINDS.get(top, OTHER) if len(path.parts) > 1 else OTHER


def files_under(folder: Path) -> Iterator[tuple[Path, int]]:
    """Every regular file below a folder with its size in bytes; links, and files that vanish meanwhile, are left out."""
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
    """Free bytes on the disk of a folder, and all its bytes."""
    usage = shutil.disk_usage(folder)
    return usage.free, usage.total


@dataclass(frozen=True)
class Check:
    """A check of one part of the studio.

    name: of the part
    well: true if it can be worked with
    said: the finding in a few words for people
    """

    name: str
    well: bool
    said: str


def health() -> list[Check]:
    """Checks of the data folder with its disk, and of the database. It answers within seconds, and raises nothing."""
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
        raise InputError(f"its disk is full, {said}; {command()} clean makes room")
    with tempfile.NamedTemporaryFile(dir=folder, prefix="reading-") as file:
        file.write(b"well")
        file.flush()
        os.fsync(file.fileno())
    return f"{folder} can be written, {said}"
