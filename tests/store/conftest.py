"""The same tests against SQLite and, in `make everything` and with its programs installed, a PostgreSQL of their own."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from engine.store.database import Database
from tests.postgres import serving


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a PostgreSQL server that listens on a socket in a temporary folder, and ends with the tests."""
    with serving(tmp_path_factory.mktemp("postgres")) as server:
        yield server.address


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.everything)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'team.db'}"
    server = request.getfixturevalue("postgres")
    name = f"test_{os.getpid()}_{abs(hash(str(tmp_path))) % 10**9}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"create database {name}")
    return server.replace("/postgres?", f"/{name}?")


@pytest.fixture(scope="session")
def new_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite database with all its tables and nothing in them, to be copied."""
    path = tmp_path_factory.mktemp("new") / "team.db"
    Database(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def db(url: str, new_file: Path) -> Iterator[Database]:
    """A database without rows; making its tables, which takes longer than most tests, is done once."""
    if url.startswith("sqlite"):
        shutil.copy(new_file, url.removeprefix("sqlite:///"))
    opened = Database(url)
    yield opened
    opened.close()
