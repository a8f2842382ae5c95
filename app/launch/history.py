"""All launches in the data folder, of every session: found, searched, listed; and started, in this one guarded place."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from app import kept, state, tables, widgets
from app.visitor import people
from engine import store, units
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.launches import Brief, brief_of
from engine.jobs.runner import Job, State
from engine.launch.preparation.launch import PLACES, PreparedLaunch
from engine.launch.running.clusters import new_run_folder


@dataclass(frozen=True)
class Launched:
    """A launch in the list: the job, its state when it was read, and its start (seconds since the epoch)."""

    job: Job
    state: State
    started: float
    brief: Brief

    @property
    def words(self) -> str:
        """The text that a search looks in."""
        ranks = f"{self.brief.ranks} ranks"
        parts = (*self.brief.plans, PLACES[self.brief.on], ranks, self.state, widgets.describe_time(self.started))
        return " ".join(parts).lower()


def launches() -> list[Launched]:
    """Every launch, newest first. A finished one is read once in the life of the server."""
    known, past = _known(), []
    for job in runner.folders(store.data_folder()):
        try:
            launch = known[job.folder] if job.folder in known else _read(job)
        except InputError:  # is being made or removed at this moment
            continue
        if launch is None or launch.state.finished:
            known[job.folder] = launch
        if launch is not None:
            past.append(launch)
    return past


@st.cache_resource(show_spinner=False)
def _known() -> dict[Path, Launched | None]:
    """The launches that have ended, by job folder; None: another kind of job."""
    return {}


def _read(job: Job) -> Launched | None:
    """A job as a launch; None when it is another kind of job, or a launch as no version since has them."""
    request = job.request
    if request.kind != "launch":
        return None
    now = job.state
    brief = brief_of(job)
    return Launched(job, now, request.created, brief) if brief else None


def search(past: list[Launched], text: str) -> list[Launched]:
    """Launches with every word of the text among plan, place, ranks, state and date."""
    words = text.lower().split()
    return [launch for launch in past if all(word in launch.words for word in words)]


def chosen(past: list[Launched]) -> Launched | None:
    """The launch to report on: the selected one, else the newest of this session that has ended, while none of it runs."""
    ended = {launch.job.id: launch for launch in past if launch.state.finished}
    if state.visit.launch_shown in ended:
        return ended[state.visit.launch_shown]
    mine = [launch for launch in past if launch.job.id in state.session.launch_jobs]
    return mine[0] if mine and all(launch.state.finished for launch in mine) else None


def show(past: list[Launched], shown: str | None) -> None:
    """The table of launches with its search; a selected one is reported on. shown: id of the launch on the page."""
    text = kept.text_input(
        "Search",
        key="launch-search",
        placeholder="plan, place, state or date",
        icon=":material/search:",
        width=360,
        label_visibility="collapsed",
    )
    if listed := search(past, text):
        tables.choose_row(
            as_text(listed, shown),
            [launch.job.id for launch in listed],
            lambda id: state.visit.set(launch_shown=id),
            f"launches-{shown}",  # where one is shown, its row can be selected again
            height=tables.low(len(listed)),
            alt="Launches, newest first",
            column_config={"": st.column_config.TextColumn(width=30)},
        )
    else:
        st.caption(f"None of {len(past)} launches has all these words.")


def fold(past: list[Launched], shown: str | None) -> None:
    """The table behind a button that says how many launches there are."""
    # Another key is another popover, which is closed: so it closes once another launch is chosen.
    with (
        st.popover(f"Launches · {len(past)}", icon=":material/history:", key=f"launches-{shown}"),
        st.container(width=tables.IN_POPOVER),
    ):
        show(past, shown)


def as_text(listed: list[Launched], shown: str | None) -> pd.DataFrame:
    """One row for each launch; figures of several plans stand in the plans' order."""
    times = [value for launch in listed for value in (*launch.brief.predicted, *launch.brief.measured) if value > 0]
    factor, unit = units.scale_of(min(times, default=1.0), units.TIME)

    def each(values: tuple[float, ...]) -> str:
        return " · ".join(units.digits(value / factor) for value in values)

    columns = {
        "": ["▸" if launch.job.id == shown else "" for launch in listed],
        "State": [launch.state.value for launch in listed],
        "When": [widgets.describe_time(launch.started) for launch in listed],
        "Plans": [" · ".join(launch.brief.plans) for launch in listed],
        "Where": [PLACES[launch.brief.on] for launch in listed],
        "Ranks": [launch.brief.ranks for launch in listed],
        "Tokens": ["" if launch.brief.tokens is None else f"{launch.brief.tokens:,}" for launch in listed],
        f"Predicted, {unit}": [each(launch.brief.predicted) for launch in listed],
        f"Measured, {unit}": [each(launch.brief.measured) for launch in listed],
        "Ratio": [
            " · ".join(
                units.ratio(measured / predicted) if predicted else "—"
                for predicted, measured in zip(launch.brief.predicted, launch.brief.measured, strict=True)
            )
            for launch in listed
        ],
    }
    return pd.DataFrame(columns)


BY = "by"
"""Argument of a launch's job: the name of the person who started it."""


def refusal() -> str | None:
    """Why this visitor may start nothing; None if they may."""
    return people.why_not_launch(st.context, st.user)


def why_not_now(past: list[Launched]) -> str | None:
    """Why nothing can be started on this machine at this moment; None if it can. past: all launches."""
    if any(not launch.state.finished and launch.brief.on in ("local", "testbed") for launch in past):
        return "A launch is running on these devices; one runs at a time."
    return None


def start(arguments: dict[str, Any]) -> None:
    """Start a launch and watch it. Raises InputError with the reason if this visitor may not, no matter what the page showed
    when the button was drawn."""
    if reason := refusal():
        raise InputError(reason)
    named, handed = arguments | {BY: people.who().name}, None
    if asked := arguments.get("own"):  # texts are kept nowhere
        named["own"], handed = asked | {"prompts": []}, json.dumps(asked["prompts"]).encode()
    # A launch that a scheduler runs elsewhere for hours takes nothing here.
    here = arguments.get("on", "local") in ("local", "testbed")
    state.add_launch_job(runner.start("launch", named, store.data_folder(), queued=here, handed=handed).id)
    state.visit.launch_shown = None


def write(launch: PreparedLaunch) -> Path:
    """Write a new run folder for a launch that is submitted by hand. Raises InputError as `start` does."""
    if reason := refusal():
        raise InputError(reason)
    with new_run_folder(launch) as folder:
        return folder
