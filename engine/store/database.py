"""The team's database: SQLite in the data folder, or the one that DATABASE_URL names (PostgreSQL)."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, exc, inspect, text
from sqlalchemy.engine import make_url

from engine.errors import InputError
from engine.files import PRIVATE_FILE, data_folder
from engine.store.files import scratch

FILE, URL = "switchyard.db", "DATABASE_URL"
PATIENCE = 20
"""Seconds for which a writer waits for another one."""
ANSWERS_WITHIN = 5
"""Seconds for which a connection waits for its server, a new one as well as one with a server that fell silent: pages
wait too."""

_LOCK = 7_283_411
"""The advisory lock of PostgreSQL that a migration holds: any number that is always the same."""


class LostError(InputError):
    """The database does not answer, now: the same question can be asked again."""


class Database:
    """A database at the newest version of the tables; made or upgraded when opened. Raises InputError if the database
    cannot be reached, or was made by a newer Switchyard.

    version: another one of `migrations`, for a backup of its time
    """

    def __init__(self, url: str, version: str = "head") -> None:
        self._engine = _engine_of(url)
        with _explained(self._engine), self._engine.connect() as connection:
            self._upgrade(connection, version)

    @property
    def address(self) -> str:
        """Address of this database, without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection that sees one state of the database."""
        return self._begun()

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction: all of it is kept, or after an exception nothing. SQLite has one writer at a time, others wait."""
        return self._begun(writes=True)

    @contextmanager
    def _begun(self, **options: Any) -> Iterator[Connection]:
        with _explained(self._engine), self._engine.connect() as connection:
            connection = connection.execution_options(**options)
            with connection.begin():
                yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection that sees one state of the database however long it takes, and holds nobody up meanwhile."""
        if self._engine.dialect.name == "sqlite":
            with _explained(self._engine), _copied(self._engine) as copy, copy.connect() as connection:
                yield connection
        else:
            with self._begun(isolation_level="REPEATABLE READ", postgresql_readonly=True) as connection:
                connection.execute(text("select 1"))  # the first query settles the state that it sees
                yield connection

    def close(self) -> None:
        self._engine.dispose()

    def _upgrade(self, connection: Connection, version: str) -> None:
        # A fifth of a second, which nobody's first page should wait for.
        from alembic import command
        from alembic.config import Config
        from alembic.util.exc import CommandError

        connection = connection.execution_options(writes=True)
        with connection.begin():
            if connection.dialect.name == "postgresql":
                connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            config = Config()
            scripts = Path(__file__).parent / "migrations"
            config.set_main_option("script_location", str(scripts).replace("%", "%%"))
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, version)
            except CommandError as error:
                raise InputError(
                    f"the database was made by a newer Switchyard ({error}); use that version or another database"
                ) from None


def database() -> Database:
    """The database that the environment names, opened once per process."""
    return _opened(address())


def address() -> str:
    """The address of the database that the environment names, with its password."""
    return os.environ.get(URL) or f"sqlite:///{data_folder() / FILE}"


def ask() -> str:
    """Address of the database that the environment names, without its password, if it answers; it is neither made nor
    upgraded. Raises InputError if it does not."""
    engine = _engine_of(address())
    try:
        made = engine.dialect.name != "sqlite" or Path(engine.url.database or "").exists()
        if made:
            with _explained(engine), engine.connect() as connection:
                inspect(connection).get_table_names()
    finally:
        engine.dispose()
    return engine.url.render_as_string(hide_password=True)


@lru_cache(maxsize=4)
def _opened(url: str) -> Database:
    return Database(url)


def _engine_of(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):  # as hosting services write it
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise InputError(f"{URL} names {parsed.get_backend_name()}; Switchyard keeps its work in SQLite or PostgreSQL")
        if parsed.get_backend_name() == "sqlite":
            engine = create_engine(parsed, connect_args={"timeout": PATIENCE})
            event.listen(engine, "do_connect", _make_private)
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        # A server whose machine vanished says nothing, and the system would wait for a quarter of an hour.
        waits = {"connect_timeout": ANSWERS_WITHIN, "tcp_user_timeout": ANSWERS_WITHIN * 1000}
        return create_engine(parsed, connect_args=waits, pool_pre_ping=True)
    except (exc.ArgumentError, exc.NoSuchModuleError):
        raise InputError(f"{URL} is not the address of a database (postgresql://user:password@host/name)") from None


def _make_private(dialect, record, arguments: tuple, options: dict) -> None:
    """Let SQLite find a file that nobody but its owner can read; its companion files become like it."""
    path = arguments[0]
    with suppress(OSError):  # SQLite reports it in its own words
        if path != ":memory:":
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))


def _prepare_sqlite(connection, record) -> None:
    # The driver must not begin transactions by itself, which it does too late: `_begin_sqlite` does.
    connection.isolation_level = None
    # With synchronous=NORMAL a power cut would take back work that people were told is saved.
    for pragma in ("journal_mode=WAL", "foreign_keys=ON", "synchronous=FULL"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that first reads and then writes fails at once when another one has written in between; one that asks
    # for the right to write at its beginning waits.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


@contextmanager
def _copied(engine: Engine) -> Iterator[Engine]:
    """A copy of an SQLite database by its online backup, which goes on while others write, for as long as it is needed."""
    with scratch() as folder:
        copied = folder / FILE
        try:
            with closing(sqlite3.connect(copied)) as into, engine.connect() as connection:
                connection.connection.driver_connection.backup(into)
        except sqlite3.Error as error:
            raise InputError(f"the database cannot be copied to {folder}: {error}") from None
        copy = create_engine(f"sqlite:///{copied}")
        try:
            yield copy
        finally:
            copy.dispose()


@contextmanager
def _explained(engine: Engine) -> Iterator[None]:
    """Turn a database's error into a line for people; a broken rule of ours is a bug and stays an exception of its own."""
    try:
        yield
    except exc.DBAPIError as error:
        # Drivers' errors for a database that is gone, going, full or read-only have many names under these classes.
        if (
            not isinstance(error, exc.OperationalError | exc.InterfaceError | exc.InternalError)
            and type(error) is not exc.DatabaseError
        ):
            raise
        said = " ".join(str(error.orig).split())[:200]
        where = engine.url.render_as_string(hide_password=True)
        raise LostError(f"the database {where} does not answer: {said}") from None
