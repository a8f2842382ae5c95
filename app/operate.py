"""Tables for an operator of the studio: its room on the disk, its jobs, its visitors, and data that may go."""

import contextlib
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pandas as pd
import streamlit as st

from app import widgets
from app.visitor.people import Visitor
from engine import store, units
from engine.errors import InputError
from engine.jobs import runner
from engine.store.database import database
from engine.upkeep import health, retention
from engine.upkeep.retention import Cleaning

RECENT = 12
"""Most ended jobs that are listed."""


@dataclass(frozen=True)
class Room:
    """Room of the data folder. free, total: bytes of its disk."""

    uses: list[health.Use]
    free: int
    total: int

    @property
    def taken(self) -> int:
        """Bytes of the data folder."""
        return sum(use.bytes for use in self.uses)


def room() -> Room:
    """Room by kind of data. Raises InputError if there is no data folder."""
    folder = store.data_folder()
    return Room(health.use_by_kind(folder), *health.free(folder))


def healthy() -> str:
    """The sentence of a studio without faults."""
    free, total = health.free(store.data_folder())
    return f"Healthy: the data folder is writable ({units.size(free)} of {units.size(total)} free) and the database answers."


def zone() -> str:
    """The zone of the times that pages show: the server's."""
    return time.strftime("%Z (UTC%z)") if time.strftime("%z") != "+0000" else "UTC"


def what_would_go() -> Cleaning:
    """Data that `clean` would remove now; nothing is removed. Raises InputError when the database does not answer."""
    return retention.clean(database(), store.data_folder(), retention.policy(), time.time(), remove=False)


def jobs() -> tuple[list[runner.Job], list[runner.Job]]:
    """The jobs that have not ended, and the newest of those that have."""
    known, running, ended = _known_to_have_ended(), [], []
    for job in runner.folders(store.data_folder()):
        with contextlib.suppress(InputError, OSError):  # being made or removed at this moment
            if job.folder not in known and not job.state.finished:
                running.append(job)
                continue
            known.add(job.folder)
            if len(ended) < RECENT:
                ended.append(job)
    return running, ended


@st.cache_resource(show_spinner=False)
def _known_to_have_ended() -> set[Path]:
    """Folders of ended jobs, which need not be read again: thousands would take the page seconds."""
    return set()


def uses_as_text(uses: list[health.Use]) -> pd.DataFrame:
    """One row for each kind, in one unit."""
    factor, unit = units.scale_of(max((use.bytes for use in uses), default=0), units.SIZE)
    whole = sum(use.bytes for use in uses) or 1
    columns = {
        "What": [use.kind for use in uses],
        "Files": [f"{use.files:,}" for use in uses],
        f"Size, {unit}": [_size(use.bytes / factor) for use in uses],
        "Share": [100 * use.bytes / whole for use in uses],
    }
    return pd.DataFrame(columns)


def _size(value: float) -> str:
    """A size in the unit of its column, which the largest one chose."""
    return units.digits(value) if value == 0 or value >= 0.01 else "< 0.01"


def jobs_as_text(ended: list[runner.Job]) -> pd.DataFrame:
    """One row for each ended job."""
    rows = []
    for job in ended:
        with contextlib.suppress(InputError, OSError, ValueError):
            row = {
                "Started": widgets.describe_time(job.started),
                "Kind": job.request.kind,
                "State": job.state.value,
                "Took": units.seconds(job.elapsed),
                "Why": job.error or "",
            }
            rows.append(row)
    return pd.DataFrame(rows, columns=["Started", "Kind", "State", "Took", "Why"])


def visitors_as_text(present: list[Visitor]) -> pd.DataFrame:
    """One row for each visitor; a name without a login is marked as typed."""
    columns = {
        "Who": [
            visitor.person.name + ("" if visitor.person.known or not visitor.person.name else " (typed)") for visitor in present
        ],
        "Role": [visitor.person.role for visitor in present],
        "From": ["this machine" if visitor.local else "elsewhere" for visitor in present],
        "Page": [visitor.page for visitor in present],
        "Here since": [widgets.describe_time(visitor.since) for visitor in present],
        "Last active": [widgets.describe_time(visitor.seen) for visitor in present],
    }
    return pd.DataFrame(columns)


def going_as_text(cleaning: Cleaning) -> pd.DataFrame:
    """One row for each kind of data that would go, in one unit."""
    sums = [
        (kind, len(parts), sum(part.size for part in parts), min(part.used for part in parts))
        for kind, parts in ((kind, list(parts)) for kind, parts in groupby(cleaning.going, lambda going: going.kind))
    ]
    factor, unit = units.scale_of(max((bytes for _, _, bytes, _ in sums), default=0), units.SIZE)
    columns = {
        "What": [kind for kind, *_ in sums],
        "Number": [f"{count:,}" for _, count, _, _ in sums],
        f"Size, {unit}": [_size(bytes / factor) for _, _, bytes, _ in sums],
        "Oldest used": [widgets.describe_time(used)[:10] for *_, used in sums],
    }
    return pd.DataFrame(columns)
