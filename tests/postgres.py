"""A PostgreSQL server of the tests' own, which can be stopped and started."""

import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDERS = (*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),)


@dataclass(frozen=True)
class Server:
    """A server that listens on a socket in its folder. user: the account that it runs as; None: the tests' own."""

    programs: Path
    folder: Path
    user: str | None

    @property
    def address(self) -> str:
        return f"postgresql://tester@/postgres?host={self.folder}"

    @property
    def runs(self) -> bool:
        return (self.folder / "data" / "postmaster.pid").exists()

    def make(self) -> None:
        self._do("initdb", "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")

    def start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.folder}' -c fsync=off"
        self._do("pg_ctl", "-o", options, "-w", "-l", str(self.folder / "log"), "start")

    def stop(self) -> None:
        """At once: whoever is connected is cut off."""
        self._do("pg_ctl", "-m", "immediate", "stop")

    def _do(self, program: str, *arguments: str) -> None:
        command = [self.programs / program, "-D", self.folder / "data", *arguments]
        subprocess.run(command, user=self.user, cwd=self.folder, check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server for as long as it is needed; the test is skipped where that cannot be. folder: for its data, where the tests are
    not root's: a server refuses to be, and its own account cannot see their folders."""
    initdb = shutil.which("initdb", path=os.pathsep.join([*map(str, FOLDERS), os.environ["PATH"]]))
    if initdb is None:
        pytest.skip("PostgreSQL is not installed")
    user = None
    if os.geteuid() == 0:
        user = "postgres"
        try:
            owner = pwd.getpwnam(user)
        except KeyError:
            pytest.skip("PostgreSQL needs a user of its own")
        folder = Path(subprocess.check_output(["mktemp", "-d", "-p", "/tmp"], text=True).strip())
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    server = Server(Path(initdb).parent, folder, user)
    try:
        server.make()
        server.start()
        yield server
    finally:
        if server.runs:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
