"""A backup of the data folder and the team's database in one file, made while studios run, and its restoration.

A backup is a zip file with a manifest, the rows of the team's database and the files of the data folder.

    manifest.json              a `Manifest`
    database/TABLE.jsonl       one row a line, as a JSON object
    data/FOLDER/…              files as they lie in the data folder

Rows are plain JSON, so that a backup of SQLite can be restored into PostgreSQL and the other way round. Timelines and
figures are left out: they can be simulated again.

It is restored into an empty data folder and an empty database. Nothing in it is trusted: members are checked before any
is written, and a backup that does not fit leaves nothing behind.
"""

import json
import os
import re
import secrets
import shutil
import stat
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, MetaData, Table, func, insert, select, text
from sqlalchemy.exc import SQLAlchemyError

from engine.errors import InputError
from engine.files import PRIVATE_FILE, make_folder, replace_atomically
from engine.formats.source import one_clear_line
from engine.jobs.protocol import ALIVE, PID, RESERVE, RESUMED
from engine.jobs.runner import ID
from engine.schema import Frozen
from engine.store import tables
from engine.store.database import Database
from engine.upkeep.health import DATABASE, files_under, free, kind_of

FORMAT = 1
MANIFEST = "manifest.json"
ROWS, DATA = "database/{}.jsonl", "data/"
TABLES = tuple(table.name for table in tables.metadata.sorted_tables)
"""In the order in which rows may be added: a row comes after those that it refers to."""
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
"""Folders of the data folder in a backup, the referring ones first: a recording that is named was saved before its name."""
OF_A_PROCESS = (PID, ALIVE, RESUMED, RESERVE)
"""Files of a job about its process: elsewhere they would speak of another one."""

LEVEL = 1
"""Level of compression: recordings halve at once, and little more with patience."""

AT_ONCE = 200
"""Rows that are added in one statement."""


class Manifest(Frozen):
    """The description of a backup.

    version: of the tables
    created: seconds since the epoch
    rows: number by table
    """

    format: int
    version: str
    created: float
    rows: dict[str, int]


def belongs(place: str) -> bool:
    """True if a backup has a file. place: relative to the data folder, with / between its parts."""
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
        ours = member.filename in known or (member.filename.startswith(DATA) and belongs(member.filename.removeprefix(DATA)))
        kind = stat.S_IFMT(member.external_attr >> 16)
        if not ours or kind not in (0, stat.S_IFREG):
            raise InputError(f"this is no backup of Switchyard: it has a member {member.filename[:80]!r}")
    if MANIFEST not in names or archive.getinfo(MANIFEST).file_size > MOST_MANIFEST:
        raise InputError(f"this is no backup of Switchyard: it has no {MANIFEST}, or one that is too long")
    if (needed := sum(member.file_size for member in members)) > room:
        raise InputError(f"the backup needs {needed:,} bytes, and the disk has {room:,} free")


def backup(db: Database, folder: Path, file: Path) -> Manifest:
    """Write a backup, which only its owner may read: addresses of sessions are in it. Raises InputError if it cannot be
    written or the database does not answer."""
    try:
        with replace_atomically(file) as draft:
            draft.chmod(PRIVATE_FILE)
            with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive:
                # The rows first: files that they refer to were saved before them, and are not removed while they do.
                with db.snapshot() as connection:
                    manifest = _write_rows(archive, connection)
                for path, place in _files(folder):
                    _write_file(archive, path, DATA + place)
                archive.writestr(MANIFEST, manifest.to_json())
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror or error}") from None
    return manifest


def _write_rows(archive: zipfile.ZipFile, connection: Connection) -> Manifest:
    version = connection.execute(text("select version_num from alembic_version")).scalar_one()
    rows = {}
    for table in tables.metadata.sorted_tables:
        with archive.open(ROWS.format(table.name), "w", force_zip64=True) as member:
            rows[table.name] = 0
            found = connection.execution_options(yield_per=100).execute(select(table).order_by(*table.primary_key.columns))
            for row in found.mappings():
                member.write(json.dumps(dict(row)).encode() + b"\n")
                rows[table.name] += 1
    return Manifest(format=FORMAT, version=version, created=time.time(), rows=rows)


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    for name in PLACES:
        for path, _ in files_under(folder / name):
            if belongs(place := path.relative_to(folder).as_posix()):
                yield path, place


def _write_file(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    """Write one file as it is now, though a job may be writing it; one that is gone meanwhile is left out."""
    try:
        source = path.open("rb")
    except FileNotFoundError:
        return
    with source:
        about = os.fstat(source.fileno())
        member = zipfile.ZipInfo(name, time.localtime(max(about.st_mtime, 315_619_200.0))[:6])  # zip begins in 1980
        member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o100600 << 16
        with archive.open(member, "w", force_zip64=True) as into:
            while block := source.read(2**20):
                into.write(block)


def restore(url: str, folder: Path, file: Path) -> Manifest:
    """Put a backup back. Raises InputError for any other file, for a data folder or a database that is not empty, and
    if the disk has no room for it. url: of the database."""
    for path, _ in files_under(folder):
        place = path.relative_to(folder)
        is_lock = place.suffix == ".lock" and len(place.parts) == 1
        if not is_lock and kind_of(place) != DATABASE:  # the database's rows are looked at later
            raise InputError(f"the data folder {folder} is not empty; restore into a new one (SWITCHYARD_DATA)")
    with one_clear_line(file), zipfile.ZipFile(file) as archive:
        check(archive, free(folder)[0])
        manifest = Manifest.from_json(archive.read(MANIFEST), f"{file.name}, {MANIFEST}")
        if manifest.format != FORMAT:
            raise InputError(f"{file.name}: a backup of format {manifest.format}; this Switchyard reads {FORMAT}")
        staged = folder / f".restoring-{secrets.token_hex(4)}"
        try:
            _unpack(archive, staged)
            _restore_database(url, archive, manifest, staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return manifest


def _unpack(archive: zipfile.ZipFile, staged: Path) -> None:
    make_folder(staged)
    for member in archive.infolist():
        if not member.filename.startswith(DATA):
            continue
        path = staged / member.filename.removeprefix(DATA)
        make_folder(path.parent)
        # No more is read than `check` has counted.
        with archive.open(member) as source, open(path, "xb", opener=partial(os.open, mode=PRIVATE_FILE)) as into:
            shutil.copyfileobj(source, into, 2**20)
        written = time.mktime((*member.date_time, 0, 0, -1))
        os.utime(path, (written, written))  # old files stay old
    os.sync()


def _restore_database(url: str, archive: zipfile.ZipFile, manifest: Manifest, staged: Path, folder: Path) -> None:
    db = Database(url, manifest.version)
    try:
        with db.writing() as connection:
            metadata = MetaData()  # of the backup's time, not of today
            metadata.reflect(connection)
            for name in (name for name in TABLES if name in metadata.tables):
                if connection.scalar(select(func.count()).select_from(metadata.tables[name])):
                    raise InputError("the database is not empty; restore into a new one")
                _add_rows(connection, archive, metadata.tables[name], manifest.rows.get(name))
            for part in staged.iterdir():
                part.rename(folder / part.name)
    finally:
        db.close()
    Database(url).close()  # upgraded, if the backup is of an older version


def _add_rows(connection: Connection, archive: zipfile.ZipFile, table: Table, count: int | None) -> None:
    added, every = 0, _rows(archive, table.name, {column.name for column in table.columns})
    while rows := list(islice(every, AT_ONCE)):
        try:
            connection.execute(insert(table), rows)
        except SQLAlchemyError as error:
            raise _damaged(table.name, f"rows that do not fit ({' '.join(str(error).split())[:160]})") from None
        added += len(rows)
    if added != count:
        raise _damaged(table.name, f"{added:,} rows where the manifest counts {count}")
    if connection.dialect.name == "postgresql" and added and "number" in table.columns:
        highest = select(func.max(table.c.number)).scalar_subquery()
        connection.execute(select(func.setval(func.pg_get_serial_sequence(table.name, "number"), highest)))


def _damaged(name: str, what: str) -> InputError:
    return InputError(f"the backup is damaged: {ROWS.format(name)} has {what}")


def _rows(archive: zipfile.ZipFile, name: str, columns: set[str]) -> Iterator[dict[str, Any]]:
    try:
        member = archive.open(ROWS.format(name))
    except KeyError:
        raise _damaged(name, "no rows at all") from None
    with member:
        while line := member.readline(MOST_ROW):
            # SQLite keeps infinite numbers and PostgreSQL refuses them.
            row = json.loads(line, parse_constant=lambda constant: None)
            if not isinstance(row, dict) or set(row) != columns:
                raise _damaged(name, "a row that is none of this table")
            yield row
