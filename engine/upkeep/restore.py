"""A backup put back into an empty data folder and an empty database. Nothing in it is trusted: members are checked before any
is written, rows are plain JSON, and what does not fit leaves nothing behind."""

import json
import os
import secrets
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, MetaData, Table, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from engine.errors import InputError
from engine.files import PRIVATE_FILE, make_folder
from engine.formats.source import one_clear_line
from engine.store.database import Database
from engine.upkeep.archive import DATA, FORMAT, MANIFEST, MOST_ROW, ROWS, TABLES, Manifest, check
from engine.upkeep.disk import DATABASE, files_under, free, kind_of

AT_ONCE = 200
"""Rows that are added in one statement."""


def restore(url: str, folder: Path, file: Path) -> Manifest:
    """Put a backup back. url: of the database. Raises InputError for what is no backup, for a data folder or a database that is
    not empty, and when the disk has no room for it."""
    _refuse_used(folder)
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


def _refuse_used(folder: Path) -> None:
    for path, _ in files_under(folder):
        place = path.relative_to(folder)
        is_lock = place.suffix == ".lock" and len(place.parts) == 1
        if not is_lock and kind_of(place) != DATABASE:  # whose rows are looked at later
            raise InputError(f"the data folder {folder} is not empty; restore into a new one (SWITCHYARD_DATA)")


def _unpack(archive: zipfile.ZipFile, staged: Path) -> None:
    make_folder(staged)
    for member in archive.infolist():
        if not member.filename.startswith(DATA):
            continue
        path = staged / member.filename.removeprefix(DATA)
        make_folder(path.parent)
        # No more is read than `check` has counted.
        with archive.open(member) as source, open(path, "xb", opener=_private) as into:
            shutil.copyfileobj(source, into, 2**20)
        written = time.mktime((*member.date_time, 0, 0, -1))
        os.utime(path, (written, written))  # what is old stays old
    os.sync()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)


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
    Database(url).close()  # upgraded, where the backup is of an older version


def _add_rows(connection: Connection, archive: zipfile.ZipFile, table: Table, count: int | None) -> None:
    added = 0
    for rows in _batches(_rows(archive, table.name, {column.name for column in table.columns})):
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
            # What SQLite keeps and PostgreSQL refuses: no number is infinite there.
            row = json.loads(line, parse_constant=lambda constant: None)
            if not isinstance(row, dict) or set(row) != columns:
                raise _damaged(name, "a row that is none of this table")
            yield row


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
