"""Sessions of the studio with the sample and plans in it, and their visitors."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import streamlit as st
from streamlit import user_info
from streamlit.testing.v1 import AppTest

from engine import store
from engine.costs import Datasheet
from engine.files import write_atomically
from engine.jobs import runner, tasks
from engine.jobs.kinds import answered
from engine.jobs.protocol import REQUEST, Context, Request
from engine.jobs.runner import Job
from engine.launch.preparation.launch import Launch
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.store.problems import problem_arguments
from engine.workload import Workload
from tests.cases.pages import open_sample, studio

TOKEN = "test-session"
JOB, ANOTHER = "20250102T030405000006-0123abcd", "20250102T030405000007-0123abcd"
"""Jobs in which plans of a test are made."""


class Fields(dict):
    """Stands for `st.session_state`, which has its values as attributes too."""

    __getattr__ = dict.__getitem__


def problem_of(app: AppTest) -> Problem:
    """The problem that is open in a session, with datasheet costs and without a step or a second model."""
    session = app.session_state
    return make_problem(store.load_workload(session["workload"]), session["cluster"], session["model"], Datasheet())


def plan(problem: Problem, name: str, *systems: str | dict) -> list[Plan]:
    """Make plans as an optimisation does, in this process. name: of their job; systems: names, or dictionaries with options"""
    folder = store.data_folder() / "jobs" / name
    folder.mkdir(parents=True)
    asked = [{"name": system} if isinstance(system, str) else system for system in systems]
    arguments = problem_arguments(problem) | {"systems": asked}
    write_atomically(folder / REQUEST, Request(kind="optimise", arguments=arguments, created=time.time()).to_json())
    context = Context(folder)
    context.finish(answered(tasks.optimise, arguments, context))
    return [Plan.from_dict(candidate["plan"], "plan") for candidate in Job(folder.name, folder).result["candidates"]]


def open_plan(app: AppTest, system: str, options: dict, job: str = JOB) -> Plan:
    """Make one plan for the open problem and open it."""
    (opened,) = plan(problem_of(app), job, {"name": system, "options": options})
    app.session_state["plan_jobs"], app.session_state["plan"] = [job], opened.id
    return opened


def open_recording(app: AppTest, workload: Workload, alone: bool = False) -> str:
    """Open a recording. alone: without those that were open. Returns its digest."""
    digest, known = store.save_workload(workload), {} if alone else app.session_state["workloads"]
    app.session_state["workloads"], app.session_state["workload"] = {**known, digest: workload.name}, digest
    return digest


def launches() -> list[Job]:
    """The launches in the data folder, the newest first."""
    return runner.jobs(store.data_folder(), "launch")


def wanted(app: AppTest, **more) -> Launch:
    """A launch of the plans of a session, on two ranks unless more is said."""
    problem, sizes = problem_of(app), {"ranks": 2, "tokens": 64}
    return Launch(tuple(app.plans), problem.workload, problem.model, problem.cluster, **sizes | more)


def session_with_plans(folder: Path, opened: int, **more: str) -> tuple[str, list[Plan]]:
    """The token and the plans of a session of the sample: a linear plan and one that sends shortest first.

    folder: the data folder, which SWITCHYARD_DATA must name; opened: the place of the open plan; more: other fields
    """
    app = open_sample(studio().run())
    plans = plan(problem_of(app), JOB, "linear", "sjf")
    kept = max((folder / "sessions").iterdir(), key=lambda file: file.stat().st_mtime_ns)  # this one was written last
    known = {"plan_jobs": [JOB], "plan": plans[opened].id} | more
    write_atomically(kept, json.dumps(json.loads(kept.read_text()) | known))
    return kept.stem, plans


def copied(session: tuple[Path, str, list[Plan]], data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """A copy of a session in a data folder of the test's own, not run yet, visited from this machine.

    session: its data folder, its token and its plans, which become the `plans` of the studio
    """
    folder, token, plans = session
    shutil.copytree(folder, data_folder)
    comes_from(None, monkeypatch)
    app = studio(session=token)
    app.plans = plans
    return app


def comes_from(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Visitors have this address; None: they are on this machine."""
    monkeypatch.setattr(type(st.context), "ip_address", property(lambda _: address))


def login(email: str, **more) -> SimpleNamespace:
    """A user as Streamlit describes one who has logged in."""
    return SimpleNamespace(is_logged_in=True, email=email, **more)


def visitor(monkeypatch: pytest.MonkeyPatch, address: str | None = None, **claims) -> None:
    """Visitors have this address (None: this machine) and these claims of a login."""
    comes_from(address, monkeypatch)
    monkeypatch.setattr(user_info, "_get_user_info", lambda: claims)
