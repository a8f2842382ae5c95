"""How much room the data folder takes, and for what."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.store.database import FILE

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
    for path, size in files_under(folder):
        found.setdefault(kind_of(path.relative_to(folder)), []).append(size)
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
