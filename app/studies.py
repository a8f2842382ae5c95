"""Studies run as jobs: start one, and watch the newest of its kind."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pandas as pd
import streamlit as st

from app import cached, failing, state, tables, widgets
from engine.jobs import runner
from engine.jobs.kinds import Answer
from engine.problem import Problem
from engine.store.problems import problem_arguments


def start(kind: str, problem: Problem | None, more: dict[str, Any]) -> None:
    """Start a study of the open problem; None: of `more` alone."""
    with failing.saying():
        job = widgets.start_job(kind, more) if problem is None else widgets.start_job_on(problem, kind, more)
        state.set_study_job(kind, job.id)


def newest(kind: str) -> runner.Job | None:
    """The newest study of a kind in this session."""
    id = state.session.study_jobs.get(kind)
    return next(iter(cached.jobs([id] if id else [])), None)


def is_running(kind: str) -> bool:
    """True if the newest study of a kind still runs."""
    job = newest(kind)
    return job is not None and not job.state.finished


def watch(kind: str, show: Callable[[Answer], None], empty: str) -> None:
    """Show the newest study of a kind: its progress, and `show` of its result so far; `empty` if there is none."""
    job = newest(kind)
    if job is None:
        st.info(empty, icon=":material/info:")
        return
    running = not job.state.finished

    @failing.fragment(run_every=1 if running else None)
    def follow() -> None:
        if job.state is not runner.State.DONE:
            widgets.job_row(job)
        with failing.saying():
            if result := cached.result_of(job):
                show(result)
        if running and job.state.finished:
            st.rerun()

    follow()


def start_and_rerun(kind: str, problem: Problem | None, more: dict[str, Any]) -> None:
    """Start a study, and draw the page again with its button off."""
    before = state.session.study_jobs.get(kind)
    start(kind, problem, more)
    if state.session.study_jobs.get(kind) != before:
        st.rerun()


def watch_for_problem(
    kind: str, problem: Problem, wanted: dict[str, Any], show: Callable[[Answer, bool], None], empty: str
) -> None:
    """Show the newest study of a kind, if it is for the open problem.

    wanted: further arguments that it must have had
    show: draws a result; its second argument is True when the study has ended
    empty: sentence to show if there is no study
    """
    job = newest(kind)
    if job is not None:
        about = problem_arguments(problem) | wanted
        if {name: job.request.arguments.get(name) for name in about} != about:
            st.info(
                "The last study is for another plan, recording, cluster, model or cost source: run it again for what is open.",
                icon=":material/info:",
            )
            return
    watch(kind, lambda result: show(result, job.state.finished), empty)


def download(points: list, name: str) -> None:
    """A button for all points of a study as CSV; times in seconds."""
    download_table(pd.DataFrame([asdict(point) for point in points]), name)


def download_table(table: pd.DataFrame, name: str) -> None:
    """A button for a table of points as CSV."""
    widgets.download("Points as CSV", lambda: tables.as_csv(table), f"{name}.csv", key=f"what-if-csv-{name}")
