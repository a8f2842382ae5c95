"""Set-up of the page tests: one sample session a worker, copied for each test; scripts and packages read once."""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import streamlit as st
from streamlit import config
from streamlit.components.v2 import manifest_scanner
from streamlit.runtime import Runtime
from streamlit.runtime.context import StreamlitHeaders
from streamlit.runtime.scriptrunner.script_cache import ScriptCache
from streamlit.runtime.state.session_state import SessionState
from streamlit.testing.v1 import AppTest, app_test, local_script_runner
from streamlit.testing.v1.local_script_runner import LocalScriptRunner

from app import failing, simulations
from app.cached import plans
from app.state import address
from app.state.stored import Session
from engine.jobs import runner
from engine.plan import Plan
from engine.store import database, team
from engine.store.database import Database
from tests import warm
from tests.cases.pages import plan_the_sample, studio, visit
from tests.cases.problems import small
from tests.cases.reviews import save
from tests.cases.sessions import TOKEN, Fields, copied, launches, open_recording, session_with_plans


class Values(Mapping):
    """The values of a session, each looked up when it is asked for."""

    def __init__(self, state: SessionState) -> None:
        self._state = state

    def __getitem__(self, key: str) -> Any:
        return self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter(GATHERED(self._state))

    def __len__(self) -> int:
        return len(GATHERED(self._state))


GATHERED = SessionState.filtered_state.fget
"""All values of a session, as Streamlit gathers them."""


@pytest.fixture(autouse=True, scope="session")
def streamlits_test_runner_is_quick() -> Iterator[None]:
    """Streamlit's own test runner does these for every run, which takes as long as some pages: it looks for components in all
    installed packages, compiles every page, searches all output of a script, every millisecond, for its end, makes a stand-in
    of its server, and a mock of the request, which makes more at every look at its headers; nearly every widget gathers all
    values of the session to look at its own. A studio reads the configuration next to `app/main.py`, the runner does not."""
    manifests, compiled = manifest_scanner.scan_component_manifests(), ScriptCache()
    server = app_test.MagicMock(spec=Runtime)

    def has_ended(runner: LocalScriptRunner) -> bool:
        runner._script_thread.join(1.0)
        return not runner._script_thread.is_alive()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", lambda: manifests)
        for module in (app_test, local_script_runner):
            patch.setattr(module, "ScriptCache", lambda: compiled)
        for option in ("browser.gatherUsageStats", "runner.magicEnabled"):
            config.set_option(option, False)
        patch.setattr(LocalScriptRunner, "script_stopped", has_ended)
        patch.setattr(type(st.context), "headers", StreamlitHeaders({}))
        patch.setattr(SessionState, "filtered_state", property(Values))
        patch.setattr(app_test, "MagicMock", lambda spec: server)
        yield


@pytest.fixture(autouse=True, scope="module")
def no_processes_are_left() -> Iterator[None]:
    """A page with something large on it starts processes to simulate in, which live as long as the studio: other tests in this
    process see to it that theirs are gone. Inputs of jobs are known by the jobs' names, which several files give theirs."""
    yield
    plans._inputs_of.clear()
    deadline = time.monotonic() + 60
    while simulations._pool._started and not simulations._pool.ready and time.monotonic() < deadline:
        time.sleep(0.05)
    simulations._pool.close()


@pytest.fixture(autouse=True)
def faults_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a page fails the test, which else would see an apology."""

    def raise_again(error: Exception) -> NoReturn:
        raise error

    monkeypatch.setattr(failing, "apologise", raise_again)


@pytest.fixture
def empty_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty session without a page, under TOKEN."""
    monkeypatch.setattr(st, "session_state", Fields())
    address.begin(TOKEN, Session())


Stored = tuple[Path, str, list[Plan]]
"""A data folder with one session, its token and its plans."""


@pytest.fixture(scope="session")
def session_with_two(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The sample with a linear plan and one that sends shortest first, the first of them open, and the team's database, whose
    tables take as long to make as a page to draw."""
    folder = tmp_path_factory.mktemp("session") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_DATA", str(folder))
        session = folder, *session_with_plans(folder, 0)
        Database(database.address()).close()
        return session


def with_fields(session: Stored, folder: Path, **fields) -> Stored:
    """A copy of a session with some fields changed."""
    before, token, plans = session
    shutil.copytree(before, folder)
    kept = folder / "sessions" / f"{token}.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | fields))
    return folder, token, plans


@pytest.fixture(scope="session")
def session_of_ana(session_with_two: Stored, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Ana's session, with the second plan open."""
    return with_fields(session_with_two, tmp_path_factory.mktemp("ana") / "data", plan=session_with_two[2][1].id, person="Ana")


@pytest.fixture(scope="session")
def session_with_review(session_of_ana: Stored, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Ana's session, with her plan saved as "to be shared" in a workspace and a decision asked for, all by the Review page."""
    folder = tmp_path_factory.mktemp("review") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_DATA", str(folder))
        app = copied(session_of_ana, folder, patch)
        team.add_workspace(database.database(), "Autumn <b>x</b>", "Ana")
        save(visit(app, "review"), "to be shared", "look here")
        database.database().close()  # which writes everything into the one file
    return folder, *session_of_ana[1:]


@pytest.fixture(scope="session")
def session_without_plans(session_with_two: Stored, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The sample alone."""
    bare = with_fields(session_with_two, tmp_path_factory.mktemp("sample") / "data", plan=None, plan_jobs=[])
    shutil.rmtree(bare[0] / "jobs")
    return bare


@pytest.fixture(scope="session")
def planned_session(session_without_plans: Stored, warm_process: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The sample planned with the default systems by a job."""
    folder = tmp_path_factory.mktemp("planned") / "data"
    shutil.copytree(session_without_plans[0], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_DATA", str(folder))
        patch.setattr(sys, "executable", str(warm.PYTHON))
        patch.setenv(warm.ADDRESS, str(warm_process))
        plan_the_sample(studio(session=session_without_plans[1]))
    return folder, session_without_plans[1], []


@pytest.fixture
def ana(session_of_ana: Stored, own_data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """Ana's session in a data folder of the test's own, not run yet; its plans are `plans`."""
    return copied(session_of_ana, own_data_folder, monkeypatch)


@pytest.fixture
def unreviewed(ana: AppTest) -> AppTest:
    """Ana's session on the Review page, in a workspace of hers with nothing in it."""
    team.add_workspace(database.database(), "Autumn <b>x</b>", "Ana")
    return visit(ana, "review")


@pytest.fixture
def reviewed(session_with_review: Stored, own_data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """Ana's session on the page of the plan that she saved, which is `saved`."""
    app = copied(session_with_review, own_data_folder, monkeypatch)
    (app.saved,) = team.saves_of(database.database(), [app.plans[1].id])
    app.session_state["reviewed"] = (app.saved.number, team.reviews_of(database.database(), app.saved.number)[0].id)
    return visit(app, "review")


@pytest.fixture
def two_plans(session_with_two: Stored, own_data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The sample with two plans, the first of them open, not run yet; its plans are `plans`."""
    return copied(session_with_two, own_data_folder, monkeypatch)


@pytest.fixture
def launch_page(two_plans: AppTest) -> Iterator[AppTest]:
    """That session on the Launch page. Launches that a test starts are ended."""
    yield visit(two_plans, "launch")
    for job in launches():
        runner.cancel(job, grace=0)
        assert runner.wait(job, 5).finished


@pytest.fixture
def sample(session_without_plans: Stored, own_data_folder: Path) -> AppTest:
    """The sample, on the Launch page, which is the quickest to draw."""
    shutil.copytree(session_without_plans[0], own_data_folder)
    return visit(studio(session=session_without_plans[1]), "launch")


@pytest.fixture
def planned(planned_session: Stored, own_data_folder: Path) -> AppTest:
    """The sample with plans of the default systems, on the Optimise page."""
    shutil.copytree(planned_session[0], own_data_folder)
    return visit(studio(session=planned_session[1]), "optimise")


@pytest.fixture
def small_recording(app: AppTest) -> AppTest:
    """A small recording on four mixed GPUs on the What-if page; no plan."""
    problem = small()
    open_recording(app, problem.workload, alone=True)
    app.session_state["model"], app.session_state["cluster"] = problem.model, problem.cluster
    return visit(app, "what_if")


@pytest.fixture
def app() -> AppTest:
    """The studio with nothing open, on its first page."""
    return studio().run()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small model."""
    from tests.cases.tiny_models import saved  # with PyTorch, which few pages need

    folder = tmp_path_factory.mktemp("models")
    saved(folder / "tiny", "olmoe")
    return folder
