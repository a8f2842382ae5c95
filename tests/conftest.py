"""Fixtures of every test: a data folder of its own; and a report at the end on tests tried again and tests skipped."""

import gc
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from engine.jobs import workers
from tests import everything, spent, warm

os.environ |= spent.ONE_THREAD | os.environ
os.environ.setdefault(spent.RUN, str(os.getpid()))

LEFT_OVER = pytest.StashKey[list[str]]()

settings.register_profile("repeatable", derandomize=True)
if "SWITCHYARD_FUZZ" not in os.environ:
    # The same commit passes or fails everywhere. What only luck finds is looked for in long runs, see `tests.cases.fuzzing`.
    settings.load_profile("repeatable")


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def own_data_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """`SWITCHYARD_DATA`, for this process and for those that it starts: a folder of the test's own that is not there yet.

    It is inside the temporary folder of a test that has one; others, the most, need none to be made.
    """
    if "tmp_path" in request.fixturenames:
        folder = request.getfixturevalue("tmp_path") / "data"
    else:
        folder = tmp_path_factory.getbasetemp() / f"data-{next(_numbers)}"
    monkeypatch.setenv("SWITCHYARD_DATA", str(folder))
    # Streamlit puts the script of a page there, and every process that later tests start would run it first.
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return folder


@pytest.fixture(autouse=True, scope="session")
def nobody_waits_for_the_disk() -> Iterator[None]:
    """No test pulls the plug: whether all that has to be on the disk is there is what `tests.faults` looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def keep_standby() -> Iterator[Callable[[], None]]:
    """A page that a test draws in its own process starts no worker ahead of a job. The function that does it, for those who
    want it."""
    kept = workers.keep_standby
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "keep_standby", lambda: None)
        yield kept


@pytest.fixture(scope="session")
def warm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The address of the process of `tests.warm`: that of the whole run, or one of this session's own."""
    if warm.ADDRESS in os.environ:
        yield Path(os.environ[warm.ADDRESS])
        return
    address = tmp_path_factory.mktemp("warm") / "address"
    with warm.serving(address):
        yield address


@pytest.fixture(scope="session")
def outcomes_of(tmp_path_factory, warm_process) -> Callable[..., list]:
    """A function that runs `python -m PROGRAM RANK RANKS FOLDER` for every rank and returns the JSON that each has written.
    program: a module of the tests; settings: environment variables"""

    def outcomes_of(program: str, ranks: int, **settings: str) -> list:
        folder = tmp_path_factory.mktemp("ranks")
        environment = os.environ | {warm.ADDRESS: str(warm_process)} | settings
        processes = [
            subprocess.Popen(
                [str(warm.PYTHON), "-m", f"tests.{program}", str(rank), str(ranks), str(folder)], cwd=warm.ROOT, env=environment
            )
            for rank in range(ranks)
        ]
        try:
            assert [process.wait(240) for process in processes] == [0] * ranks
        finally:
            for process in processes:
                process.kill()
        return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(ranks)]

    return outcomes_of


@pytest.fixture
def warm_python(warm_process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs, commands and ranks start in a moment, where how they start is not the point."""
    monkeypatch.setattr(sys, "executable", str(warm.PYTHON))
    monkeypatch.setenv(warm.ADDRESS, str(warm_process))


@pytest.fixture
def cold_python(warm_python: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter itself, for single tests of a module whose others start warm."""
    monkeypatch.setattr(sys, "executable", warm.INTERPRETER)


def pytest_collection_finish() -> None:
    """Imported modules stay: the collector, which Streamlit calls after every run of a page, need not walk through it."""
    gc.collect()
    gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test with a clock may lose once to other work on the machine; a test that is too slow loses every time."""
    if item.get_closest_marker("clock"):
        item.add_marker(pytest.mark.flaky(reruns=2))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return everything.is_left_out(collection_path) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out single tests that only `make everything` runs."""
    if everything.WANTED:
        return
    left_out = [item for item in items if item.get_closest_marker("everything")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail when a process that a test started still runs: it would take time from the tests of somebody else."""
    if os.environ[spent.RUN] != str(os.getpid()):
        return  # `tests.run` looks when all its sessions have ended
    session.config.stash[LEFT_OVER] = found = spent.left_over()
    if found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were tried again, and count skipped ones by reason: an unread skip is a hole in the suite."""
    for process in terminalreporter.config.stash.get(LEFT_OVER, []):
        terminalreporter.write_line(f"Still runs after the tests: {process}")
    for test, tries in Counter(report.nodeid for report in terminalreporter.stats.get("rerun", [])).items():
        terminalreporter.write_line(f"Tried again {tries} ×: {test}")
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        terminalreporter.write_line("Nothing was skipped.")
        return
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    terminalreporter.write_line(f"{len(skipped)} skipped:")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} × {reason}")
