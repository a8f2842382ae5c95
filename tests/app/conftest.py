"""What the tests of the pages share."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import streamlit as st
from streamlit import config
from streamlit.components.v2 import manifest_scanner
from streamlit.runtime.scriptrunner.script_cache import ScriptCache
from streamlit.testing.v1 import AppTest, local_script_runner
from streamlit.testing.v1.local_script_runner import LocalScriptRunner

from app import failing, simulations
from app.state import address
from app.state.stored import Session
from engine.plan import Plan
from tests.app.test_launch_page import copied, session_with_plans

TOKEN = "test-session"


@pytest.fixture(autouse=True, scope="session")
def packages_are_searched_once() -> Iterator[None]:
    """Every studio looks for components in all installed packages as it starts."""
    manifests = manifest_scanner.scan_component_manifests()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", lambda: manifests)
        yield


@pytest.fixture(autouse=True, scope="session")
def scripts_are_compiled_once() -> Iterator[None]:
    """As in a studio, which reads the configuration beside `app/main.py`: Streamlit's own test runner does not, and compiles
    every page anew for every run."""
    compiled = ScriptCache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_script_runner, "ScriptCache", lambda: compiled)
        for option in ("browser.gatherUsageStats", "runner.magicEnabled"):
            config.set_option(option, False)
        yield


@pytest.fixture(autouse=True, scope="module")
def no_processes_are_left() -> Iterator[None]:
    """A page with something large on it starts processes to simulate in, which live as long as the studio: other tests in this
    process see to it that theirs are gone."""
    yield
    deadline = time.monotonic() + 60
    while simulations._pool._started and not simulations._pool.ready and time.monotonic() < deadline:
        time.sleep(0.05)
    simulations._pool.close()


@pytest.fixture(autouse=True, scope="session")
def scripts_are_waited_for() -> Iterator[None]:
    """Streamlit's own test runner looks through all that a script has said, every millisecond, for whether it has ended."""

    def has_ended(runner: LocalScriptRunner) -> bool:
        runner._script_thread.join(1.0)
        return not runner._script_thread.is_alive()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalScriptRunner, "script_stopped", has_ended)
        yield


@pytest.fixture(autouse=True)
def faults_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a page fails the test, which else would see an apology."""

    def raise_again(error: Exception) -> NoReturn:
        raise error

    monkeypatch.setattr(failing, "apologise", raise_again)


class Fields(dict):
    """Stands for `st.session_state`, whose values are attributes too."""

    __getattr__ = dict.__getitem__


@pytest.fixture
def empty_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty session without a page, under TOKEN."""
    monkeypatch.setattr(st, "session_state", Fields())
    address.begin(TOKEN, Session())


@pytest.fixture(scope="module")
def session_of_ana(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[Plan]]:
    """A data folder with Ana's session of the sample and two plans, the second of them open; its token and its plans."""
    folder = tmp_path_factory.mktemp("session") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_DATA", str(folder))
        return folder, *session_with_plans(folder, 1, person="Ana")


@pytest.fixture
def ana(session_of_ana, own_data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """That session in a data folder of the test's own, not run yet; its plans are `plans`."""
    return copied(session_of_ana, own_data_folder, monkeypatch)
