"""The session's file: in the data folder under a token in the address. Also links to plans, which name no session.

A token stands in the address from the moment that its session is stored. An address without a stored session names one that was
deleted, or one in the data folder of another studio.

Every tab at the address has a session of its own in the studio's memory. The stored session counts how often it was stored, so
a tab that another tab has overtaken says so, and stores nothing until a person has chosen between the two.
"""

import secrets
from typing import Any

import streamlit as st

from app.state.fields import session, visit
from app.state.stored import VERSION, Session, read, revision_of, write
from engine import store
from engine.errors import InputError

_PARAMETER = "session"

UNKNOWN = (
    "The session in this address is not here: it was deleted, or it is in the data folder of another studio. An empty one is "
    "open."
)


def restore() -> None:
    """Bring back the session that the address names, or begin an empty one; call once per run, before anything else."""
    if visit.token is None:
        token = st.query_params.get(_PARAMETER, "")
        try:
            text = store.load_session(token) if token else None
            opened, left_out = (Session(), None) if text is None else read(text)
            if token and text is None:
                token, left_out = "", UNKNOWN
        except InputError as error:
            token, opened, left_out = "", Session(), f"No session could be opened: {error}. An empty one is open."
        begin(token or secrets.token_urlsafe(12), opened)
        if left_out:
            visit.left_out = left_out
    else:
        _look()
    visit.drawn_overtaken = visit.overtaken
    _write_token()


def _write_token() -> None:
    """Have the address lead to the session once it is stored. Navigation drops the query, so it is written on every run."""
    token = visit.token if visit.seen is not None else None
    if token is None:
        st.query_params.pop(_PARAMETER, None)
    elif st.query_params.get(_PARAMETER) != token:
        st.query_params[_PARAMETER] = token


def begin_anew() -> None:
    """Go on in an empty session; the one that was open stays under its address."""
    begin(secrets.token_urlsafe(12), Session())
    visit.edit_round += 1


def peek(token: str) -> tuple[Session, float] | None:
    """A stored session, and when it was stored, in seconds since the epoch; None: there is none, or it cannot be read."""
    try:
        text, written = store.load_session(token), store.session_written(token)
    except InputError:
        return None
    return None if text is None or written is None else (read(text)[0], written[0] / 1e9)


def go_on_with(token: str) -> None:
    """Open a stored session in this tab."""
    if (kept := peek(token)) is not None:
        begin(token, kept[0])
        visit.edit_round += 1


def begin(token: str, opened: Session) -> None:
    """Open a session under its token, every field under its name in `st.session_state`. It is stored when it changes."""
    if visit.token is not None:  # a browser that shows another session's
        visit.draw_anew({*session.choices, *opened.choices})
        visit.sessions_shown += 1
    visit.token = token
    for name in Session.model_fields:
        st.session_state[name] = getattr(opened, name)
    visit.seen, visit.tried = _written(), set()
    visit.overtaken, visit.not_stored = False, None


def change(**fields: Any) -> None:
    """Change fields of the session and store it. If it cannot be stored, it changes in this tab alone, which says so."""
    for name, value in fields.items():
        st.session_state[name] = value
    store_again()


def update(**fields: Any) -> None:
    """Change fields of the session and store it, if any of the values is another one than before."""
    if any(value != getattr(session, name) for name, value in fields.items()):
        change(**fields)


def store_again() -> None:
    """Store the session as this tab has it, unless another tab's has overtaken it."""
    try:
        with store.alone_with_sessions():
            kept = store.load_session(visit.token)
            if _is_of_another_tab(kept):
                visit.overtaken = True
                return
            revision = max(revision_of(kept), session.revision) + 1
            fields = {name: getattr(session, name) for name in Session.model_fields}
            text = write(Session.model_construct(**fields | {"version": VERSION, "revision": revision}))
            visit.tried = {*visit.tried, text}
            store.save_session(visit.token, text)
            st.session_state["revision"], visit.seen = revision, _written()
            visit.tried = {text}
        _write_token()
    except InputError as error:
        visit.not_stored = str(error)
    else:
        visit.not_stored = None


def open_newer() -> None:
    """Open the session that another tab has stored in place of this tab's."""
    try:
        text = store.load_session(visit.token)
        opened, left_out = (Session(), None) if text is None else read(text)
    except InputError as error:
        visit.notice = str(error)
        return
    begin(visit.token, opened)
    visit.edit_round += 1
    if left_out:
        visit.left_out = left_out


def keep_older() -> None:
    """Store this tab's session in place of the one that another tab has stored."""
    try:
        st.session_state["revision"] = revision_of(store.load_session(visit.token))
    except InputError as error:
        visit.notice = str(error)
        return
    visit.overtaken = False
    store_again()


def was_overtaken() -> bool:
    """True if another tab has stored a later session since this tab's page was drawn, which did not say so yet."""
    if visit.drawn_overtaken is not False:
        return False
    _look()
    return visit.overtaken


def _look() -> None:
    """See if another tab has stored a later session, when anything was stored since."""
    if _written() == visit.seen:
        return
    try:
        kept = store.load_session(visit.token)
    except InputError:  # said when this one is stored
        return
    visit.overtaken = _is_of_another_tab(kept)
    visit.seen = _written()


def _is_of_another_tab(kept: str | None) -> bool:
    """True if the stored session is later than this tab's. A disk may fail after it has taken everything, so the stored text
    can be one that this tab was told it could not store."""
    return revision_of(kept) > session.revision and kept not in visit.tried


def _written() -> tuple[int, int] | None:
    try:
        return store.session_written(visit.token)
    except InputError:
        return None


def asked_link() -> tuple[str, str, str] | None:
    """Return plan, review and place of a comment ("": none) in the address; None: no plan, or this tab wrote them."""
    link = tuple(st.query_params.get(name, "") for name in ("plan", "review", "about"))
    return link if link[0] and link != visit.link else None


def write_link(plan: str, review: str, about: str = "") -> None:
    """Let the address lead to a plan, a review and the place that a comment points to ("": to none)."""
    for name, value in (("plan", plan), ("review", review), ("about", about)):
        if value and st.query_params.get(name) != value:
            st.query_params[name] = value
        elif not value and name in st.query_params:
            del st.query_params[name]
    visit.link = (plan, review, about)
