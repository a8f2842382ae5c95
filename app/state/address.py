"""Where a session is kept: in the data folder under a token in the address. And links to plans, which name no session.

A token stands in the address from the moment that its session is stored. So an address names a session that was stored once;
where there is none now it was deleted, or it is in the data folder of another studio.

Every tab at the address has a session of its own in the studio's memory. What is stored counts how often it was, so that a tab
whose session was overtaken by another tab's says so, and stores nothing until a person has chosen between the two.
"""

import secrets
from typing import Any

import streamlit as st

from app.state import moment
from app.state.session import VERSION, Session, read, revision_of, write
from engine import store
from engine.errors import InputError

_PARAMETER, _TOKEN, _LINK, _SEEN, _TRIED = "session", "token", "link", "session_written", "session_tried"
_BEHIND = "drawn_overtaken"

UNKNOWN = (
    "The session in this address is not here: it was deleted, or it is in the data folder of another studio. An empty one is "
    "open."
)


def restore() -> None:
    """Bring back the session that the address names, or begin an empty one; call once per run, before anything else."""
    if _TOKEN not in st.session_state:
        token = st.query_params.get(_PARAMETER, "")
        try:
            text = store.load_session(token) if token else None
            session, left_out = (Session(), None) if text is None else read(text)
            if token and text is None:
                token, left_out = "", UNKNOWN
        except InputError as error:
            token, session, left_out = "", Session(), f"No session could be opened: {error}. An empty one is open."
        begin(token or secrets.token_urlsafe(12), session)
        if left_out:
            moment.say_left_out(left_out)
    else:
        _look()
    st.session_state[_BEHIND] = moment.is_overtaken()
    _write_token()


def _write_token() -> None:
    """Have the address lead to the session, once it is stored. Navigation drops the query, so it is written on every run."""
    token = st.session_state[_TOKEN] if st.session_state[_SEEN] is not None else None
    if token is None:
        st.query_params.pop(_PARAMETER, None)
    elif st.query_params.get(_PARAMETER) != token:
        st.query_params[_PARAMETER] = token


def begin_anew() -> None:
    """Go on in an empty session; the one that was open stays under its address."""
    begin(secrets.token_urlsafe(12), Session())
    moment.begin_table()


def begin(token: str, session: Session) -> None:
    """Open a session under its token, every field under its name in `st.session_state`. Nothing is stored until it changes."""
    if _TOKEN in st.session_state:  # a browser that shows another session's
        moment.draw_anew({*st.session_state["choices"], *session.choices})
        moment.show_another_session()
    st.session_state[_TOKEN] = token
    for name in Session.model_fields:
        st.session_state[name] = getattr(session, name)
    st.session_state[_SEEN], st.session_state[_TRIED] = _written(), set()
    moment.say_overtaken(False)
    moment.say_not_stored(None)


def change(**fields: Any) -> None:
    """Change fields of the session and store it. Where it cannot be, it is changed in this tab all the same, which says so."""
    for name, value in fields.items():
        st.session_state[name] = value
    store_again()


def store_again() -> None:
    """Store the session as this tab has it, unless another tab's has overtaken it."""
    token = st.session_state[_TOKEN]
    try:
        with store.alone_with_sessions():
            kept = store.load_session(token)
            if _is_of_another_tab(kept):
                moment.say_overtaken(True)
                return
            revision = max(revision_of(kept), st.session_state["revision"]) + 1
            fields = {name: st.session_state[name] for name in Session.model_fields}
            text = write(Session.model_construct(**fields | {"version": VERSION, "revision": revision}))
            st.session_state[_TRIED] = {*st.session_state[_TRIED], text}
            store.save_session(token, text)
            st.session_state["revision"], st.session_state[_SEEN] = revision, _written()
            st.session_state[_TRIED] = {text}
        _write_token()
    except InputError as error:
        moment.say_not_stored(str(error))
    else:
        moment.say_not_stored(None)


def open_newer() -> None:
    """Open what another tab has stored in the place of what this tab has."""
    try:
        session, left_out = _stored(st.session_state[_TOKEN])
    except InputError as error:
        moment.notice(str(error))
        return
    begin(st.session_state[_TOKEN], session)
    moment.begin_table()
    if left_out:
        moment.say_left_out(left_out)


def keep_older() -> None:
    """Store what this tab has in the place of what another tab has stored."""
    try:
        st.session_state["revision"] = revision_of(store.load_session(st.session_state[_TOKEN]))
    except InputError as error:
        moment.notice(str(error))
        return
    moment.say_overtaken(False)
    store_again()


def was_overtaken() -> bool:
    """Whether another tab has stored a later session since this tab's page was drawn, which does not say so then."""
    if _BEHIND not in st.session_state or st.session_state[_BEHIND]:
        return False
    _look()
    return moment.is_overtaken()


def _stored(token: str) -> tuple[Session, str | None]:
    """The session under a token, empty where none is, and in a sentence what of it does not fit. Raises InputError."""
    text = store.load_session(token)
    return (Session(), None) if text is None else read(text)


def _look() -> None:
    """See whether another tab has stored a later session, where anything was stored since."""
    if _written() == st.session_state[_SEEN]:
        return
    try:
        kept = store.load_session(st.session_state[_TOKEN])
    except InputError:  # said when this one is stored
        return
    moment.say_overtaken(_is_of_another_tab(kept))
    st.session_state[_SEEN] = _written()


def _is_of_another_tab(kept: str | None) -> bool:
    """Whether what is stored is later than what this tab has. A disk may fail when it has taken all, so that what is there can
    be what this tab was told it could not store."""
    return revision_of(kept) > st.session_state["revision"] and kept not in st.session_state[_TRIED]


def _written() -> tuple[int, int] | None:
    try:
        return store.session_written(st.session_state[_TOKEN])
    except InputError:
        return None


def asked_link() -> tuple[str, str, str] | None:
    """The plan, the review and what a comment points to (or "") in the address; None: no plan, or this session wrote them."""
    link = tuple(st.query_params.get(name, "") for name in ("plan", "review", "about"))
    return link if link[0] and link != st.session_state.get(_LINK) else None


def write_link(plan: str, review: str, about: str = "") -> None:
    """Let the address lead to a plan, a review and what a comment points to ("": to none)."""
    for name, value in (("plan", plan), ("review", review), ("about", about)):
        if value and st.query_params.get(name) != value:
            st.query_params[name] = value
        elif not value and name in st.query_params:
            del st.query_params[name]
    st.session_state[_LINK] = (plan, review, about)
