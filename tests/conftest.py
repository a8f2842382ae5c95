"""What every test shares: a data folder of its own, and a plain word at the end on what was tried again and what not run."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import settings

from tests import warm

for _variable in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT"):
    os.environ.setdefault(_variable, "1")
"""One thread for the linear algebra of NumPy and PyTorch. There are as many test processes as processors already, and threads
beyond that wait for one another in busy loops: an eigenvalue problem of 80 rows takes ten times as long. Read when the
libraries are loaded, which is later; processes that tests start inherit it. Launches tell their ranks a number of threads, and
the rank that computes what one process computes takes all cores: the limit holds for those."""

settings.register_profile("repeatable", derandomize=True)
if "SWITCHYARD_FUZZ" not in os.environ:
    # The same commit passes or fails everywhere. What only luck finds is looked for in long runs, see `tests.formats.fuzzing`.
    settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`SWITCHYARD_DATA` inside the test's temporary folder, for this process and for those that it starts."""
    folder = tmp_path / "data"
    monkeypatch.setenv("SWITCHYARD_DATA", str(folder))
    return folder


@pytest.fixture(autouse=True, scope="session")
def nobody_waits_for_the_disk() -> Iterator[None]:
    """No test pulls the plug: whether all that has to be on the disk is there is what `tests.faults` looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session")
def warm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the process of `tests.warm` is asked."""
    address = tmp_path_factory.mktemp("warm") / "address"
    with warm.serving(address):
        yield address


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
    """What is imported stays: the collector, which Streamlit calls after every run of a page, need not walk through it."""
    gc.collect()
    gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """What holds seconds may lose once to other work on the machine; what takes too long by itself loses every time."""
    if item.get_closest_marker("clock"):
        item.add_marker(pytest.mark.flaky(reruns=2))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that wait for browsers and ranks begin first and are spread between those that only compute, so that no
    processor idles in between and none is left alone with a long file at the end."""
    files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    here = Path(__file__).parent
    waiting = [file for file in files if file[0].path.parent in (here / "browser", here / "launch", here / "slurm")]
    computing = [file for file in files if file not in waiting]
    places = {id(file): (index + 0.5) / len(part) for part in (waiting, computing) for index, file in enumerate(part)}
    # The waiting ones are dealt out over the first two thirds of the run.
    places |= {id(file): places[id(file)] * 2 / 3 for file in waiting}
    items[:] = [item for file in sorted(files, key=lambda file: places[id(file)]) for item in file]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which tests were tried again, and how many were skipped and why: a skip that nobody reads is a hole in the suite."""
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
