"""Who is here: the visitors whose pages are open on this studio, each with the page that was drawn last."""

import logging
import time
from dataclasses import dataclass, replace

import streamlit as st
from streamlit.runtime import Runtime
from streamlit.runtime.scriptrunner import get_script_run_ctx

from app.visitor import guard, people
from engine import logs

_LOG = logging.getLogger(f"{logs.OURS}.visitors")


@dataclass(frozen=True)
class Visitor:
    """since, seen: when the page was opened and last drawn, in seconds since the epoch."""

    person: people.Person
    local: bool
    page: str
    since: float
    seen: float


def note(page: str) -> None:
    """This visitor is drawing a page; call once a run."""
    context = get_script_run_ctx()
    if context is None:
        return
    here, now = _here(), time.time()
    before = here.get(context.session_id)
    if before is None:
        for gone in [id for id in list(here) if not _is_open(id)]:
            here.pop(gone, None)
        person = people.who()
        _LOG.info("a visitor came", extra={"role": person.role, "login": person.known})
        before = Visitor(person, guard.is_local(st.context), page, now, now)
    here[context.session_id] = replace(before, person=people.who(), page=page, seen=now)


def visitors() -> list[Visitor]:
    """Whose pages are open, who was active last first."""
    present = [visitor for id, visitor in list(_here().items()) if _is_open(id)]
    return sorted(present, key=lambda visitor: -visitor.seen)


def _is_open(id: str) -> bool:
    return Runtime.exists() and Runtime.instance().is_active_session(id)


@st.cache_resource(show_spinner=False)
def _here() -> dict[str, Visitor]:
    """By Streamlit's own id of a page, which opens nothing."""
    return {}
