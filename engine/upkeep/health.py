"""Whether a studio can work: room on its disk, a folder that it may write, a database that answers."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import InputError
from engine.store import data_folder, database
from engine.units import size
from engine.upkeep.disk import free

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
