"""What a backup is: a zip file with what it is of, the rows of the team's database and the files of the data folder.

    manifest.json              a `Manifest`
    database/TABLE.jsonl       one row a line, as a JSON object
    data/FOLDER/…              files as they lie in the data folder

Rows are plain JSON, so that a backup of SQLite can be restored into PostgreSQL and the other way round. Timelines and
figures are left out: they can be simulated again.
"""

import re
import stat
import zipfile

from engine.errors import InputError
from engine.jobs.protocol import ALIVE, PID, RESERVE, RESUMED
from engine.jobs.runner import ID
from engine.schema import Frozen
from engine.store import tables

FORMAT = 1
MANIFEST = "manifest.json"
ROWS, DATA = "database/{}.jsonl", "data/"
TABLES = tuple(table.name for table in tables.metadata.sorted_tables)
"""In the order in which rows may be added: what is referred to before what refers."""
MOST_FILES = 2_000_000
MOST_MANIFEST = 2**20
MOST_ROW = 2**29
"""Bytes of one row: plans may have millions of sends."""

PLACES = {
    "sessions": re.compile(r"[A-Za-z0-9_-]{8,40}\.json"),
    "jobs": re.compile(rf"{ID.pattern}/[^/].*", re.ASCII),
    "documents": re.compile(r"[0-9a-f]{64}\.json"),
    "configs": re.compile(r"[0-9a-f]{64}\.json"),
    "workloads": re.compile(r"[0-9a-f]{64}\.npz"),
}
"""What a backup has of the data folder, what refers to others first: a recording that is named was saved before its name."""
OF_A_PROCESS = (PID, ALIVE, RESUMED, RESERVE)
"""Files of a job that are its process's: elsewhere they would speak of another one."""


class Manifest(Frozen):
    """What a backup is of. version: of the tables; created: seconds since the epoch; rows: by table."""

    format: int
    version: str
    created: float
    rows: dict[str, int]


def belongs(place: str) -> bool:
    """Whether a backup has a file; place: from the data folder, with / between its parts."""
    folder, _, rest = place.partition("/")
    if folder not in PLACES or not PLACES[folder].fullmatch(rest):
        return False
    parts = rest.split("/")
    return (
        len(place) <= 1000
        and place.isprintable()
        and "\\" not in place
        and not any(part in ("", ".", "..") for part in parts)
        and not (folder == "jobs" and parts[1] in OF_A_PROCESS)
    )


def check(archive: zipfile.ZipFile, room: int) -> None:
    """Raise InputError unless every member is a file that a backup has, named once, and all of them fit into `room` bytes."""
    members = archive.infolist()
    known = {MANIFEST, *(ROWS.format(table) for table in TABLES)}
    names = {member.filename for member in members}
    if len(members) > MOST_FILES or len(names) < len(members):
        raise InputError("this is no backup of Switchyard: it has too many members, or one of them twice")
    for member in members:
        ours = member.filename in known or (
            member.filename.startswith(DATA) and belongs(member.filename.removeprefix(DATA))
        )
        kind = stat.S_IFMT(member.external_attr >> 16)
        if not ours or kind not in (0, stat.S_IFREG):
            raise InputError(f"this is no backup of Switchyard: it has a member {member.filename[:80]!r}")
    if MANIFEST not in names or archive.getinfo(MANIFEST).file_size > MOST_MANIFEST:
        raise InputError(f"this is no backup of Switchyard: it has no {MANIFEST}, or one that is too long")
    if (needed := sum(member.file_size for member in members)) > room:
        raise InputError(f"the backup needs {needed:,} bytes, and the disk has {room:,} free")
