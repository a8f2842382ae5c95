"""The running jobs of this session, on every page: progress, time left, and Stop."""

import streamlit as st

from app import cached, failing, state, widgets
from app.launch import watch
from app.tables import plain
from engine.jobs import runner
from engine.jobs.runner import Job, State

TITLES = {
    "optimise": "Plans",
    "launch": "Launch",
    "calibrate": "Calibration",
    "affinity": "Affinity study",
    "sweep": "Sweep",
    "sensitivity": "Sensitivity",
    "curve": "Curve of a change",
    "contention": "Contention study",
    "imprecision": "Traffic noise",
    "capacity": "Capacity: GPUs like the open ones",
    "replan": "Plan after a change",
    "front": "Balance against affinity",
    "matrix": "Cross-workload score",
    "verdict": "Verdict",
    "redundancy": "Spare slots",
    "drift": "Drift of traffic",
    "size": "Capacity: machines",
    "deployments": "Capacity: users",
    "lina": "Lina at run time",
    "record": "Recording",
    "reproduce": "Results of a paper",
}
"""Names of kinds of jobs on the pages."""

_ended: set[str] = set()
"""Ids of jobs that have ended, which is final: a session may have hundreds, and this page part looks every second."""


def show() -> None:
    """The jobs of this session that run or wait, newest first, each with its progress, the time left and Stop; nothing when
    there is none, and then nothing is asked again either. Narrow enough for a sidebar: call it inside `with st.sidebar`."""
    if _unfinished():
        failing.fragment(run_every=1)(_rows)()


def _rows() -> None:
    jobs = _unfinished()
    for job in jobs:
        _row(job)
    if not jobs:
        st.rerun()  # their results are drawn, and nothing is asked every second any more


def _unfinished() -> list[Job]:
    ids = {*state.session.plan_jobs, *state.study_jobs(), *state.session.launch_jobs} - _ended
    jobs = cached.jobs(sorted(ids, reverse=True))
    _ended.update(job.id for job in jobs if job.state.finished)
    return [job for job in jobs if job.id not in _ended]


def _row(job: Job) -> None:
    standing, progress = job.state, job.progress
    kind = job.request.kind
    parts = [f"**{plain(TITLES.get(kind, kind))}**"]
    if standing is State.RUNNING:
        parts += filter(None, [widgets.time_left(job)])
    else:
        parts.append(widgets.standing_in_words(job, standing))
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small", wrap=False):
        st.progress((progress.done or 0.0) if progress else 0.0, text=" · ".join(parts))
        st.button(
            "Stop",
            key=f"stop-running-{job.id}",
            icon=":material/stop:",
            type="tertiary",
            disabled=standing is State.CANCELLING,
            on_click=runner.cancel,
            args=(job, watch.grace(job)),
        )
