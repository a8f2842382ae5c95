"""The visitor's last sessions, which live in addresses: their browser keeps these, and a new tab offers to go on with one.

Only the addresses are the browser's. A session's name, time and contents are read from the data folder, where a removed one is
no longer found.
"""

from dataclasses import dataclass
from datetime import datetime

import streamlit as st

from app import components, state
from app.tables import plain
from app.visitor import people

MOST = 3
"""Sessions that are offered."""


@dataclass(frozen=True)
class Earlier:
    """A session to go on with.

    name: of its recording, else its model or cluster
    opened: what else is open in it
    stored: seconds since the epoch
    """

    token: str
    name: str
    opened: tuple[str, ...]
    stored: float


def remember() -> None:
    """Have the browser keep this session's address, or tell those that it keeps; call once a run."""
    if (person := people.session_owner()) is None:
        return
    token = None if state.is_empty() else state.visit.token
    components.remember_session(token, person, lambda tokens: state.visit.set(recalled_sessions=tuple(map(str, tokens))))


def earlier() -> list[Earlier]:
    """The visitor's last sessions that still exist and have something open, the newest first."""
    found = []
    for token in state.visit.recalled_sessions:
        if token == state.visit.token or (kept := state.peek(token)) is None:
            continue
        session, stored = kept
        names = [session.workloads.get(session.workload or ""), session.model and session.model.name]
        names.append(session.cluster and session.cluster.name)
        if session.plan_jobs:
            names.append(f"{len(session.plan_jobs)} run{'s' * (len(session.plan_jobs) > 1)} of plans")
        if first := list(filter(None, names)):
            found.append(Earlier(token, first[0], tuple(first[1:]), stored))
    return sorted(found, key=lambda one: -one.stored)[:MOST]


def offer() -> None:
    """A button for each of them; nothing where there is none."""
    if not (sessions := earlier()):
        return
    st.caption("Continue")
    for one in sessions:
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.button(
                plain(one.name),
                icon=":material/history:",
                key=f"continue-{one.token}",
                on_click=state.go_on_with,
                args=(one.token,),
            )
            st.caption(plain(" · ".join([f"{datetime.fromtimestamp(one.stored):%Y-%m-%d %H:%M}", *one.opened])))
