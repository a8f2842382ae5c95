"""The same tests against SQLite and, where its programs are installed, a PostgreSQL of their own."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from engine.store.database import Database

FOLDERS = (*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a PostgreSQL server that listens on a socket in a temporary folder, and ends with the tests."""
    initdb = shutil.which("initdb", path=os.pathsep.join([*map(str, FOLDERS), os.environ["PATH"]]))
    if initdb is None:
        pytest.skip("PostgreSQL is not installed")
    programs, user = Path(initdb).parent, None
    folder = Path("/tmp") if os.geteuid() == 0 else tmp_path_factory.mktemp("postgres")
    if os.geteuid() == 0:  # it refuses to run as root
        user = "postgres"
        try:
            owner = pwd.getpwnam(user)
        except KeyError:
            pytest.skip("PostgreSQL needs a user of its own")
        folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    data = folder / "data"

    def do(*command: str | Path) -> None:
        subprocess.run(command, user=user, cwd=folder, check=True, capture_output=True, timeout=60)

    try:
        do(initdb, "-D", data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
        do(programs / "pg_ctl", "-D", data, "-o", options, "-w", "-l", folder / "log", "start")
        try:
            yield f"postgresql://tester@/postgres?host={folder}"
        finally:
            do(programs / "pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'team.db'}"
    server = request.getfixturevalue("postgres")
    name = f"test_{os.getpid()}_{abs(hash(str(tmp_path))) % 10**9}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"create database {name}")
    return server.replace("/postgres?", f"/{name}?")


@pytest.fixture
def db(url: str) -> Iterator[Database]:
    opened = Database(url)
    yield opened
    opened.close()
