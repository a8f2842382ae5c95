"""A pytest plugin for one of several processes that share the files of a run: each takes the next file as soon as it is free.

A file is collected by the process that runs it, by nobody else, and its processor seconds are noted.
"""

import gc
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import spent

FOLDER = "SWITCHYARD_TEST_QUEUE"
"""An environment variable: the folder of the run, with the list `FILES`, one path a line. Who takes line N makes `N.taken`."""
FILES = "files"
USAGE = "usage.jsonl"
"""A row a file: its path, its processor seconds, and `again`, true if other work on the machine made a test be tried again."""


class Turns:
    """Collects and runs one file after the other, and adds the seconds of each to `USAGE`."""

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER])
        os.environ[spent.ENDED] = str(self.folder / f"ended-{os.getpid()}")
        self.seconds: Counter[str] = Counter()
        self.noted = 0.0
        self.files: dict[str, pytest.Module] = {}
        self.collected = False
        self.again: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> pytest.CollectReport | None:
        """No file is imported before its turn: at first all are empty."""
        if self.collected or not isinstance(collector, pytest.Module):
            return None
        self.files[collector.nodeid] = collector
        return pytest.CollectReport(collector.nodeid, "passed", None, [])

    def pytest_collection_finish(self) -> None:
        self.collected = True

    def _note(self, path: str) -> None:
        """Charge the processor seconds since the last note to a file."""
        now = spent.so_far()
        self.seconds[path] += max(0.0, now - self.noted)  # the seconds of a process that nobody waited for are lost at its end
        self.noted = now

    def _taken(self) -> Iterator[str]:
        """The paths that this process gets from the list."""
        for number, path in enumerate((self.folder / FILES).read_text().splitlines()):
            try:
                (self.folder / f"{number}.taken").touch(exist_ok=False)
            except FileExistsError:
                continue
            yield path

    def _tests(self, session: pytest.Session) -> Iterator[tuple[str, pytest.Item]]:
        """All tests of this process with their files; a file is imported when its first test is asked for."""
        running = ""
        for path in self._taken():
            self._note(running)
            tests = list(session.genitems(self.files[path]))
            session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=tests)
            gc.collect()
            gc.freeze()  # as in `tests.conftest` for what is imported
            self._note(path)
            running = path
            for test in tests:
                yield path, test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":
            self.again.add(report.nodeid.partition("::")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run every test with the next one known, which decides the fixtures that end."""
        count, self.noted = 0, spent.so_far()
        tests = self._tests(session)
        path, test = next(tests, ("", None))
        while test is not None:
            next_path, following = next(tests, ("", None))
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            count += 1
            if next_path != path:
                self._note(path)
                row = {"file": path, "seconds": round(self.seconds[path], 3), "again": path in self.again}
                with (self.folder / USAGE).open("a") as record:
                    record.write(json.dumps(row) + "\n")
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            path, test = next_path, following
        session.testscollected = count
        return True


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Turns())
