"""How the What-if page starts a study and shows what it has found so far."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from app import state, tables
from app.optimise import studies
from engine.problem import Problem
from engine.store.problems import problem_arguments

running = studies.is_running


def run(kind: str, problem: Problem, more: dict[str, Any]) -> None:
    """Start a study, and draw the page again with its button off."""
    before = state.study_job(kind)
    studies.run(kind, problem, more)
    if state.study_job(kind) != before:
        st.rerun()


def watch(
    kind: str, problem: Problem, wanted: dict[str, Any], show: Callable[[dict[str, Any], bool], None], empty: str
) -> None:
    """The newest study of a kind, if it is about what is open now; wanted: further arguments that it must have had."""
    job = studies.newest(kind)
    if job is not None:
        about = problem_arguments(problem) | wanted
        if {name: job.request.arguments.get(name) for name in about} != about:
            st.info(
                "The last study is for another plan, recording, cluster, model or cost source: run it again for what is "
                "open.",
                icon=":material/info:",
            )
            return
    studies.watch(kind, lambda result: show(result, job.state.finished), empty)


def download(points: list, name: str) -> None:
    """A button for a study's points in full; times in seconds."""
    download_table(pd.DataFrame([point.to_dict() for point in points]), name)


def download_table(table: pd.DataFrame, name: str) -> None:
    """The same of a study whose points stand in a table of its own."""
    st.download_button(
        "Points as CSV",
        lambda: tables.as_csv(table),
        f"{name}.csv",
        "text/csv",
        icon=":material/download:",
        on_click="ignore",
        key=f"what-if-csv-{name}",
    )
