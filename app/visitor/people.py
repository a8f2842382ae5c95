"""Who is looking: whoever logged in where the operator configured a login (OIDC), else a name that a person typed."""

import contextlib
import getpass
import os
from collections.abc import Mapping
from dataclasses import dataclass

import streamlit as st
from streamlit.errors import Error as StreamlitError

from app import state
from app.components import own_name, way_back
from app.text import plain, sentence
from app.visitor import guard, roles
from app.visitor.roles import Role
from engine.errors import InputError
from engine.store import team, team_approval

SWITCH = "SWITCHYARD_LOGIN"


@dataclass(frozen=True)
class Person:
    """name: as it stands beside what they say; empty while nobody has typed one. known: logged in, so that it is theirs."""

    name: str
    role: Role
    known: bool


def who() -> Person:
    """The visitor."""
    role = roles.role_of(st.user)
    if roles.is_logged_in(st.user):
        return Person(_vouched(), role, True)
    return Person(state.person() or _of_this_machine(), role, False)


def login() -> str | None:
    """What a login knows the visitor by, for good: their address, else the provider's own id of them; None without a login."""
    if not roles.is_logged_in(st.user):
        return None
    own_id = " ".join(str(getattr(st.user, claim, "") or "") for claim in ("iss", "sub")).strip()
    return roles.email_of(st.user) or own_id or None


def reader() -> tuple[str, str] | None:
    """What this visitor's looks are kept under, a login or a typed name, and the name that they write under; None while nobody
    knows who they are."""
    name = who().name
    return (login() or name, name) if name else None


def _vouched() -> str:
    """The name and the address that the login tells, as one line that can be kept."""
    email = roles.email_of(st.user)
    name = "".join(
        character for character in str(getattr(st.user, "name", "") or "") if character.isprintable()
    ).strip()
    both = f"{name} ({email})" if name and email else name or email or str(getattr(st.user, "sub", "") or "somebody")
    return both if len(both) <= 120 else (email or name)[:120]


def _of_this_machine() -> str:
    """The name of the account that runs the studio, for a visitor on the same machine."""
    if not guard.is_local(st.context):
        return ""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def why_not(needed: Role) -> str | None:
    """Why this visitor may not do what a role may; None when they may."""
    person = who()
    if not roles.includes(person.role, needed):
        return f"Your role here is {person.role}: you may {roles.MEANING[person.role]}, not {roles.MEANING[needed]}."
    if not person.name:
        return "Set your name first, at the bottom left."
    return None


def allow(needed: Role) -> None:
    """Raises InputError when this visitor may not do what a role may; a name is not asked for."""
    if not roles.includes(role := who().role, needed):
        raise InputError(f"your role here is {role}: you may {roles.MEANING[role]}, not {roles.MEANING[needed]}")


def writer(needed: Role) -> str:
    """The name under which this visitor writes. Raises InputError when they may not, whatever a page has drawn."""
    if reason := why_not(needed):
        raise InputError(reason)
    return who().name


def admit() -> None:
    """Stop a run at the login when the operator wants everybody to log in; lead who has just logged in to where they were."""
    if roles.is_logged_in(st.user):
        _lead_back()
        return
    if os.environ.get(SWITCH) != "required":
        return
    st.header("Switchyard", anchor=False)
    if not _providers():
        st.error(
            "The operator of this studio wants everybody to log in, but has not said where.", icon=":material/lock:"
        )
        st.caption(f"{SWITCH}=required needs a section auth in the studio's secrets.toml; docs/team.md shows one.")
        st.stop()
    again = getattr(st.user, "is_logged_in", False)
    st.info("Your login has expired: log in again." if again else "Log in to see this studio.", icon=":material/lock:")
    _say_unreadable()
    if "plan" in st.query_params:
        st.caption("Your link leads to its plan once you are logged in.")
    _login()
    st.stop()


@st.fragment
def _lead_back() -> None:
    if not state.is_back():
        way_back.back(state.come_back)


def show() -> None:
    """Who is looking, at the foot of the frame of every page, with what can be changed about it."""
    person = who()
    icon = ":material/account_circle:" if person.known else ":material/person:"
    name = plain(person.name) or "Your name"
    with st.popover(name, icon=icon, type="tertiary", key="people"):
        allowed = [roles.MEANING[role] for role in roles.ORDER if roles.includes(person.role, role)]
        st.caption(f"You may {'; '.join(allowed)}.")
        _say_unreadable()
        if guard.may_operate(st.context, st.user):
            st.page_link("../pages/operate.py", label="Administration", icon=":material/monitor_heart:")
        if person.known:
            st.button("Log out", icon=":material/logout:", on_click=_log_out)
            return
        _rename(person)
        _login()


def remember() -> None:
    """Have the browser keep the name that was typed, or tell the one that it keeps."""
    if not who().known:
        own_name.remember(state.person(), _recall)


def _recall(name: str) -> None:
    with contextlib.suppress(InputError):  # it cannot be typed any more
        state.recall_person(checked(name))


def _log_out() -> None:
    state.leave()
    st.logout()


def _say_unreadable() -> None:
    """What of the operator's settings cannot be read."""
    for read, then in (
        (roles.mapping, "nobody may do more than look"),
        (roles.login_hours, "nobody counts as logged in"),
        (team_approval.is_forbidden, "nobody may approve"),
    ):
        try:
            read()
        except InputError as error:
            st.error(plain(f"{error}: {then}."), icon=":material/error:")


def _rename(person: Person) -> None:
    with st.form("people-name", border=False):
        name = st.text_input(
            "Your name", person.name, max_chars=120, help="stands beside what you save, say and decide"
        )
        if st.form_submit_button("Set name", icon=":material/check:"):
            try:
                state.set_person(checked(name))
            except InputError as error:
                st.error(sentence(str(error)), icon=":material/error:")
            else:
                st.rerun()


def checked(name: str) -> str:
    """A typed name as it is kept. Raises InputError for one that cannot be, or that could be taken for a login's."""
    name = team.clean_name(name, "you")
    if "@" in name and _providers():
        raise InputError("a name with an e-mail address belongs to whoever logs in with it; log in or leave it out")
    return name


def _login() -> None:
    if _providers() and not state.has_left():
        way_back.leaving()
    for provider, label in _providers().items():
        if st.button(label, key=f"login-{provider}", icon=":material/login:"):
            try:
                st.login(provider)
            except StreamlitError as error:
                st.error(plain(f"the login does not work: {' '.join(str(error).split())}"), icon=":material/error:")


def _providers() -> dict[str, str]:
    """Where people can log in: the name for `st.login`, and the text of its button."""
    if "is_logged_in" not in st.user:  # as it is when no login is configured
        return {}
    section = st.secrets["auth"]
    named = {provider: f"Log in with {provider}" for provider, value in section.items() if isinstance(value, Mapping)}
    return named if "client_id" not in section else {"default": "Log in"} | named
