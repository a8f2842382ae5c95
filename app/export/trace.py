"""A plan's timeline for Perfetto: the prediction, and beside it a run that was measured."""

import streamlit as st

from app import cached, widgets
from app.export.engines import Taker, file_name
from app.launch import history, report
from app.launch.history import Launched
from engine.errors import InputError
from engine.formats.perfetto import write_trace
from engine.jobs.runner import State
from engine.launch.preparation.launch import PLACES
from engine.plan import Plan
from engine.problem import Problem

WANTED = {"predicted", "measured"}
"""Timelines of a run; those of older versions may lack them."""


def show(plan: Plan, problem: Problem, taker: Taker, key: str) -> None:
    """The choice of a measured run where there is one, and the download."""
    runs = _runs(plan)
    chosen = None
    if runs:
        chosen = st.selectbox(
            "Measurement as a second group",
            [*range(len(runs)), None],
            format_func=lambda place: (
                "none, the prediction for the cluster alone" if place is None else _title(runs[place][0])
            ),
            key=f"{key}-export-run-{plan.id[:16]}",
            width=480,
            help="The prediction beside it is then the one for where it ran, not for the drawn cluster.",
        )
    else:
        st.caption("Once a launch of this plan has been measured, its measurement can go along as a second group.")
    st.download_button(
        f"Download {file_name(plan, taker)}",
        lambda: _text(plan, problem, None if chosen is None else runs[chosen]),
        file_name(plan, taker),
        "application/json",
        icon=":material/download:",
        on_click="ignore",
        key=f"{key}-export-trace",
    )


def _text(plan: Plan, problem: Problem, run: tuple[Launched, int] | None) -> str:
    return write_trace(cached.simulate(plan, problem)) if run is None else write_trace(*report.timelines(*run))


def _title(launch: Launched) -> str:
    ranks = "" if launch.brief.ranks is None else f", {launch.brief.ranks} ranks"
    return f"{widgets.describe_time(launch.started)}, {PLACES[launch.brief.on]}{ranks}"


def _runs(plan: Plan) -> list[tuple[Launched, int]]:
    """Launches that measured the plan, newest first, each with its place among those that ran in turn."""
    runs = []
    for launch in history.launches():
        if launch.state is not State.DONE:
            continue
        try:
            measured = (cached.result_of(launch.job) or {}).get("runs", [])
        except InputError:
            continue
        runs += [
            (launch, place) for place, run in enumerate(measured) if run.get("plan") == plan.id and set(run) >= WANTED
        ]
    return runs
