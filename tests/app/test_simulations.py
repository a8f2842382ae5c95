"""Simulations beside the studio: the same answers as in it, whoever asks, and an end for what nobody waits for any more."""

import threading
import time
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import simulations, state
from app.cached import figures
from engine import store
from engine.compare.what_if import Change, Outlook, outlook_after
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate import simulate
from engine.store import simulated
from tests.app.test_pages import ROOT, visit
from tests.app.test_what_if_page import titles
from tests.cases.samples import linear_plan
from tests.studies.test_what_if import small

pytestmark = pytest.mark.slow

CHANGES = (Change(), Change(network=2), Change(noise=0.5), Change(width=0.5, dtype="fp8"))


@pytest.fixture(scope="module")
def beside() -> Iterator[None]:
    """Every simulation in another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulations, "FEW_SENDS", -1)
        simulations._pool.start()
        deadline = time.monotonic() + 60
        while not simulations._pool.ready:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield
    simulations._pool.close()


def two_models() -> Problem:
    problem = small()
    return make_problem(
        problem.workload, problem.cluster, problem.model, problem.cost, (problem.workload, problem.model)
    )


def same(mine: Outlook, other: Outlook) -> bool:
    return all(np.array_equal(getattr(mine, field.name), getattr(other, field.name)) for field in fields(Outlook))


@pytest.mark.parametrize("problem", [small(), two_models()], ids=["one model", "two models"])
def test_outlooks_and_timelines_are_those_of_this_process(beside, empty_session, monkeypatch, problem):
    plan = linear_plan(problem)
    for change in CHANGES:
        here = outlook_after(problem, plan, change)
        (there,) = simulations.outlooks(problem, [plan], change)
        assert same(here, there) and there is not here
    pd.testing.assert_frame_equal(simulations.timeline(plan, problem).events, simulate(plan, problem).events)


def test_many_at_once_get_each_their_own(beside, empty_session):
    problem, answers = small(), {}
    plan = linear_plan(problem)
    changes = [Change(network=1 + index / 10) for index in range(20)]

    def ask(change: Change) -> None:
        (answers[change.network],) = simulations.outlooks(problem, [plan], change)

    threads = [threading.Thread(target=ask, args=(change,)) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(answers[change.network], outlook_after(problem, plan, change)) for change in changes)


def test_a_change_that_cannot_be_is_said_in_one_line(beside, empty_session):
    problem = small()
    with pytest.raises(InputError, match="no GPU of the cluster is"):
        simulations.outlooks(problem, [linear_plan(problem)], Change(network=2, gpu_type="unknown"))


def test_the_page_shows_the_same(beside, monkeypatch):
    problem, page = small(), AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run()
    page.session_state["workloads"] = {store.save_workload(problem.workload): problem.workload.name}
    page.session_state["workload"] = problem.workload.digest
    page.session_state["model"], page.session_state["cluster"] = problem.model, problem.cluster
    visit(page, "what_if")
    page.select_slider(key="what-if-network").set_value(0.25).run()
    there = titles(page, "what-if")
    assert len(there) == 3 and not page.exception and not page.error
    monkeypatch.setattr(simulations, "FEW_SENDS", 10_000)
    st.cache_resource.clear()
    page.run()
    assert titles(page, "what-if") == there


def test_a_session_that_has_left_does_not_wait(beside, monkeypatch):
    class LeftError(Exception):
        pass

    def left() -> None:
        raise LeftError

    monkeypatch.setattr(state, "end_if_left", left)
    problem = small()
    with pytest.raises(LeftError):
        simulations.outlooks(problem, [linear_plan(problem)], Change(network=3))


def test_a_small_simulation_stays_here_unless_another_one_is_going_on(monkeypatch):
    asked: list[int] = []

    class Recorder:
        ready = True

        def start(self) -> None:
            """Nothing to start."""

        def answers(self, questions: list, still_wanted) -> list:
            asked.append(len(questions))
            return [question.work(*question.large.values(), *question.small) for question in questions]

    monkeypatch.setattr(simulations, "_pool", Recorder())
    monkeypatch.setattr(simulations, "FEW_SENDS", 10_000)
    problem = small()
    plan: Plan = linear_plan(problem)
    assert same(simulations.outlooks(problem, [plan], CHANGES[1])[0], outlook_after(problem, plan, CHANGES[1]))
    assert not asked
    with simulations._here:
        simulations.outlooks(problem, [plan, plan], CHANGES[1])
    assert asked == [2]
    monkeypatch.setattr(simulations, "FEW_SENDS", -1)
    simulations.timeline(plan, problem)
    assert asked == [2, 1]


def test_the_main_script_does_nothing_in_a_process_of_the_pool():
    """It is read again there, as multiprocessing does with the main script of whoever starts a process."""
    names: dict[str, object] = {"__name__": "__mp_main__", "__file__": str(ROOT / "app" / "main.py")}
    exec((ROOT / "app" / "main.py").read_text(), names)
    assert "st" not in names


@pytest.mark.parametrize("name", ["optimise", "timeline", "what_if"])
def test_no_page_simulates_again_after_a_restart(ana, monkeypatch, name):
    monkeypatch.setattr(simulated, "LONG", 0)
    st.cache_resource.clear()
    visit(ana.run(), name)
    st.cache_resource.clear()  # as in a studio that has just been started

    def again(*arguments: object) -> None:
        raise AssertionError("a page simulates what was simulated before")

    for module, function in ((simulations, "_answers"), (figures, "engine_metrics"), (figures, "engine_migration")):
        monkeypatch.setattr(module, function, again)
    shown = visit(ana.run(), name)
    assert not shown.exception and not shown.error and (shown.dataframe or shown.get("plotly_chart"))
