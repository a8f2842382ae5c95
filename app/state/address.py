"""Where a session is kept: in the data folder under a token in the address. And links to plans, which name no session."""

import secrets
from typing import Any

import streamlit as st

from app.state import moment
from app.state.session import Session, read, write
from engine import store
from engine.errors import InputError

_PARAMETER, _TOKEN, _LINK = "session", "token", "link"


def restore() -> None:
    """Bring back the session that the address names, or begin an empty one; call once per run, before anything else."""
    if _TOKEN not in st.session_state:
        token = st.query_params.get(_PARAMETER, "")
        try:
            text = store.load_session(token) if token else None
        except InputError:
            token, text = "", None
        session, left_out = (Session(), None) if text is None else read(text)
        begin(token or secrets.token_urlsafe(12), session)
        if left_out:
            moment.say_left_out(left_out)
    # Navigation drops the query, so it is written on every run.
    if st.query_params.get(_PARAMETER) != st.session_state[_TOKEN]:
        st.query_params[_PARAMETER] = st.session_state[_TOKEN]


def begin(token: str, session: Session) -> None:
    """Open a session under its token, every field under its name in `st.session_state`. Nothing is stored until it changes."""
    st.session_state[_TOKEN] = token
    for name in Session.model_fields:
        st.session_state[name] = getattr(session, name)


def change(**fields: Any) -> None:
    """Change fields of the session and store it."""
    for name, value in fields.items():
        st.session_state[name] = value
    session = Session.model_construct(**{name: st.session_state[name] for name in Session.model_fields})
    store.save_session(st.session_state[_TOKEN], write(session))


def asked_link() -> tuple[str, str] | None:
    """The plan and the review (or "") in the address; None: none, or they are in it because this session wrote them."""
    link = (st.query_params.get("plan", ""), st.query_params.get("review", ""))
    return link if link[0] and link != st.session_state.get(_LINK) else None


def write_link(plan: str, review: str) -> None:
    """Let the address lead to a plan and a review ("": to none)."""
    for name, value in (("plan", plan), ("review", review)):
        if value and st.query_params.get(name) != value:
            st.query_params[name] = value
        elif not value and name in st.query_params:
            del st.query_params[name]
    st.session_state[_LINK] = (plan, review)
