"""What starts programs from the page, in one place, so that nothing starts unguarded."""

from pathlib import Path
from typing import Any

import streamlit as st

from app import state
from app.launch.history import Launched
from app.visitor import guard, people
from engine import store
from engine.errors import InputError
from engine.jobs import runner
from engine.launch.preparation.prepared import PreparedLaunch
from engine.launch.running.clusters import new_run_folder

BY = "by"
"""In the arguments of a launch's job: the name of whoever started it."""


def refusal() -> str | None:
    """Why this visitor may start nothing; None when they may."""
    return guard.why_not(st.context, st.user)


def why_not_now(past: list[Launched]) -> str | None:
    """Why nothing can be started on this machine at this moment; None when it can. past: all launches."""
    if any(not launch.state.finished and launch.brief.on in ("local", "testbed") for launch in past):
        return "A launch is running on these devices; one runs at a time."
    return None


def start(arguments: dict[str, Any]) -> None:
    """Start a launch and watch it. Raises InputError with the reason when this visitor may not, whatever was drawn when the
    button was."""
    if reason := refusal():
        raise InputError(reason)
    named = arguments | {BY: people.who().name}
    # What a scheduler runs elsewhere for hours takes nothing here.
    here = arguments.get("on", "local") in ("local", "testbed")
    state.add_launch_job(runner.start("launch", named, store.data_folder(), queued=here).id)
    state.show_launch(None)


def write(launch: PreparedLaunch) -> Path:
    """Write a new run folder for a launch that is submitted by hand. Raises InputError as `start` does."""
    if reason := refusal():
        raise InputError(reason)
    with new_run_folder(launch) as folder:
        return folder
