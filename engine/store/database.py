"""The team's database: SQLite in the data folder, or what DATABASE_URL names (PostgreSQL)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from engine.errors import InputError
from engine.store.files import data_folder

FILE, URL = "switchyard.db", "DATABASE_URL"
PATIENCE = 20
"""Seconds for which a writer waits for another one, and a connection for its server."""

_LOCK = 7_283_411
"""Of PostgreSQL's advisory locks, the one that a migration holds: any number that is always the same."""


class Database:
    """A database at the newest version of the tables; made or upgraded when opened.

    Raises InputError when it cannot be reached, or was made by a newer Switchyard.
    """

    def __init__(self, url: str) -> None:
        self._engine = _engine_of(url)
        with _explained(self._engine), self._engine.connect() as connection:
            self._upgrade(connection)

    @property
    def address(self) -> str:
        """Which database this is, without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection that sees one state of the database."""
        with _explained(self._engine), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction: all of it is kept, or after an exception nothing. SQLite has one writer at a time, others wait."""
        with _explained(self._engine), self._engine.connect() as connection:
            connection = connection.execution_options(writes=True)
            with connection.begin():
                yield connection

    def close(self) -> None:
        self._engine.dispose()

    def _upgrade(self, connection: Connection) -> None:
        connection = connection.execution_options(writes=True)
        with connection.begin():
            if connection.dialect.name == "postgresql":
                connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            config = Config()
            scripts = Path(__file__).parent / "migrations"
            config.set_main_option("script_location", str(scripts).replace("%", "%%"))
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise InputError(
                    f"the database was made by a newer Switchyard ({error}); use that version or another database"
                ) from None


def database() -> Database:
    """The database that the environment names, opened once per process."""
    return _opened(os.environ.get(URL) or f"sqlite:///{data_folder() / FILE}")


@lru_cache(maxsize=4)
def _opened(url: str) -> Database:
    return Database(url)


def _engine_of(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):  # as hosting services write it
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise InputError(
                f"{URL} names {parsed.get_backend_name()}; Switchyard keeps its work in SQLite or PostgreSQL"
            )
        if parsed.get_backend_name() == "sqlite":
            engine = create_engine(parsed, connect_args={"timeout": PATIENCE})
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        return create_engine(parsed, connect_args={"connect_timeout": PATIENCE}, pool_pre_ping=True)
    except (ArgumentError, NoSuchModuleError):
        raise InputError(f"{URL} is not the address of a database (postgresql://user:password@host/name)") from None


def _prepare_sqlite(connection, record) -> None:
    # The driver must not begin transactions by itself, which it does too late: `_begin_sqlite` does.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", "synchronous=NORMAL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that first reads and then writes fails at once when another one has written in between; one that asks
    # for the right to write at its beginning waits.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


@contextmanager
def _explained(engine: Engine) -> Iterator[None]:
    """Turn what a database says into a line for people; a broken rule of ours is a bug and stays what it is."""
    try:
        yield
    except DBAPIError as error:
        kind = type(error.orig).__name__
        if kind not in ("OperationalError", "DatabaseError", "InterfaceError", "DiskFull", "ReadOnlySqlTransaction"):
            raise
        said = " ".join(str(error.orig).split())[:200]
        where = engine.url.render_as_string(hide_password=True)
        raise InputError(f"the database {where} does not answer: {said}") from None
