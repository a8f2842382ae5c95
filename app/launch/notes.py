"""Launches that have ended, noted in the team's database, so that what was measured stands beside the plan."""

from typing import Any

import streamlit as st

from app import cached
from app.launch import start
from app.launch.history import Launched
from app.text import plain
from engine.errors import InputError
from engine.jobs.runner import Job
from engine.launch.preparation.launch import plans_in
from engine.plan import Plan
from engine.store import team
from engine.store.database import database

NOBODY = "the command line"
"""Whose a launch is that names nobody."""


def note(launch: Launched) -> None:
    """Note every plan of a launch that is done; a database that does not answer is said and holds nothing up."""
    try:
        _noted(database().address, launch.job.id, launch)
    except InputError as error:
        st.caption(f"Not noted for the team: {plain(str(error))}.")


@st.cache_resource(max_entries=1024, show_spinner=False)
def _noted(address: str, id: str, _launch: Launched) -> int:
    """How many plans of a launch were noted; done once in the life of the server."""
    job, brief = _launch.job, _launch.brief
    result = cached.result_of(job) or {}
    runs = runs_of(job, result, brief.on, brief.ranks, _launch.started)
    for run in runs:
        team.note_run(database(), **run)
    return len(runs)


def runs_of(job: Job, result: dict[str, Any], place: str, ranks: int | None, started: float) -> list[dict[str, Any]]:
    """The arguments of `note_run` for every plan of a launch. result: its job's; started: seconds since the epoch."""
    asked = job.request.arguments
    plans = {plan.id: plan for plan in (Plan.from_dict(plan, "plan") for plan in plans_in(asked))}
    about = {"device": result.get("device"), "tokens": result.get("tokens"), "ranks": ranks}
    return [
        {
            "id": f"{job.id}-{number}",
            "plan": plans[run["plan"]],
            "place": place,
            "by": asked.get(start.BY) or NOBODY,
            "at": started,
            "predicted": run["predicted_seconds"],
            "measured": run["measured_seconds"],
            "report": about | {"passes": run["pass_seconds"]},
        }
        for number, run in enumerate(result.get("runs", []))
        if run.get("plan") in plans
    ]
