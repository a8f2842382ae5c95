"""Running launches: the progress of each and of its ranks, and the output of a rank."""

import time

import streamlit as st

from app import cached, failing, state, tables, widgets
from app.launch.history import Launched
from engine import units
from engine.jobs import runner
from engine.jobs.launches import run_folder
from engine.jobs.runner import Job
from engine.launch.rank.failure import log_tail, standing

TESTBED_GRACE = 8.0
"""Seconds in which a stopped launch on a testbed may end by itself: it takes its network apart."""

RECORDING_GRACE = 6.0
"""Seconds in which a stopped recording may put together what it has: 100 MB take some 1.3 s, the largest 3 s."""

LINES = 400
HEIGHT = 330
FEW = 16
"""Ranks that fit in a row."""


def grace(job: Job) -> float:
    """Seconds that a job is given to stop by itself."""
    if job.request.kind == "record":
        return RECORDING_GRACE
    return TESTBED_GRACE if job.request.arguments.get("on") == "testbed" else runner.GRACE


def watch() -> None:
    """The running launches of this session; once one has ended the page is drawn again, with its measurements."""
    running = any(not job.state.finished for job in cached.jobs(state.session.launch_jobs))
    failing.fragment(run_every=1 if running else None)(_follow)()


def _follow() -> None:
    for job in cached.jobs(state.session.launch_jobs):
        finished = job.state.finished
        if state.visit.newly_finished(job.id, finished):
            state.visit.launch_shown = job.id
            st.rerun()
        if not finished:
            widgets.job_row(job, grace(job))
            ranks(job)


def others(past: list[Launched]) -> None:
    """Launches that other sessions on this data folder have running, with a button that watches one here."""
    running = [launch for launch in past if not launch.state.finished and launch.job.id not in state.session.launch_jobs]
    for launch in running:
        label = f"Watch the launch of {widgets.describe_time(launch.started)}"
        if st.button(label, key=f"adopt-{launch.job.id}", icon=":material/group:"):
            state.add_launch_job(launch.job.id)
            st.rerun()


def ranks(job: Job) -> None:
    """Progress of every rank of a launch, and the end of one rank's output: of the one that failed unless another is chosen."""
    now = standing(run_folder(job))
    if now is None:
        st.caption("No rank has started yet.")
        return
    left, right = st.columns([5, 6], gap="medium")
    with left:
        moment = job.finished or time.time()
        rows = [
            {
                "Rank": rank,
                "Done": 100 * step.done if step else 0.0,
                "Doing": step.message if step else "starting",
                "Last seen": f"{units.seconds(max(0.0, moment - step.time))} ago" if step else "",
            }
            for rank, step in enumerate(now.steps)
        ]
        column = st.column_config
        height = "content" if len(rows) <= 8 else HEIGHT
        column_config = {
            "Rank": column.NumberColumn(width=45),
            "Doing": column.TextColumn(width=230),
            "Done": column.ProgressColumn(format="%.0f %%", min_value=0, max_value=100, width=110),
            "Last seen": column.TextColumn(width=90),
        }
        tables.show(rows, hide_index=True, height=height, alt="Progress of every rank", column_config=column_config)
    with right:
        every, usual, key = range(len(now.steps)), now.failed or 0, f"log-{job.id}-{now.failed}"

        def called(rank: int) -> str:
            return f":material/error: {rank}" if rank == now.failed else str(rank)

        # The one that ended the launch, unless a person wants another.
        if len(every) > FEW:
            rank = st.selectbox("Log of rank", every, usual, called, key=key)
        else:
            rank = widgets.segments("Log of rank", every, default=usual, required=True, format_func=called, key=key)
        # As high when it is empty, so that nothing jumps while it fills; and the newest lines are in view.
        with st.container(height=HEIGHT - 70, border=False, autoscroll=True):
            st.code(log_tail(run_folder(job), rank, LINES) or "(it has printed nothing)", language=None, wrap_lines=True)
