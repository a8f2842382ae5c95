"""A backup of the data folder and the team's database in one file, made while studios run."""

import json
import os
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection, select, text

from engine.errors import InputError
from engine.files import PRIVATE_FILE, replace_atomically
from engine.store import tables
from engine.store.database import Database
from engine.upkeep.archive import DATA, FORMAT, MANIFEST, PLACES, ROWS, Manifest, belongs
from engine.upkeep.disk import files_under

LEVEL = 1
"""Of compression: recordings halve at once, and little more with patience."""


def backup(db: Database, folder: Path, file: Path) -> Manifest:
    """Write a backup, which only its owner may read: addresses of sessions are in it. Raises InputError when it cannot be
    written or the database does not answer."""
    try:
        with replace_atomically(file) as draft:
            draft.chmod(PRIVATE_FILE)
            with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive:
                # The rows first: what they refer to was saved before them, and is not removed while they do.
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
            found = connection.execution_options(yield_per=100).execute(
                select(table).order_by(*table.primary_key.columns)
            )
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
    """One file as it is now, which a job may be writing; one that is gone meanwhile is left out."""
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
