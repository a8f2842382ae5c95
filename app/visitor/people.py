"""The visitor of a page: a login where the operator configured one (OIDC), else a name that a person typed.

Also who may start a launch or look after the studio, and the visitors with open pages.
"""

import contextlib
import getpass
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import streamlit as st
from streamlit.errors import Error as StreamlitError
from streamlit.runtime import Runtime
from streamlit.runtime.scriptrunner import get_script_run_ctx

from app import components, failing, state
from app.tables import plain, sentence
from app.visitor import roles
from app.visitor.roles import Role
from engine import logs
from engine.errors import InputError
from engine.store import team, team_approval
from engine.workload import digest_of

FORWARDED = (
    *("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Server"),
    *("X-Real-Ip", "X-Client-Ip", "True-Client-Ip", "Cf-Connecting-Ip", "Fly-Client-Ip", "X-Envoy-External-Address"),
)
"""Headers that proxies add."""
PROXY = "SWITCHYARD_PROXY"
"""Environment variable: 1 if a proxy stands before the studio, so that no request is a local one."""
HERE = ("localhost", "127.0.0.1", "::1")
GUARD_SWITCH = "SWITCHYARD_REMOTE_LAUNCH"


def why_not_launch(context: Any, user: Any) -> str | None:
    """None when this visitor may launch, otherwise the reason for people.

    Visitors on this machine may; others only when the operator has switched remote launches on and they have logged in. Nobody
    may with a lower role.
    context, user: `st.context` and `st.user`
    """
    if not roles.includes(role := roles.role_of(user), "launch"):
        return f"Your role here is {role}: you may not {roles.MEANING['launch']}."
    if is_local(context):
        return None
    if os.environ.get(GUARD_SWITCH) != "1":
        return (
            "Launching is off for visitors who are not on this machine. "
            f"The operator can allow it with {GUARD_SWITCH}=1 and a login."
        )
    if not roles.is_logged_in(user):
        return "Log in to launch: this studio allows launches from other machines only to people it knows."
    return None


def may_operate(context: Any, user: Any) -> bool:
    """True if this visitor may see the operator's page.

    A person with the role may, who logged in or is on this machine; without any roles everybody on this machine.
    context, user: as for `why_not_launch`
    """
    if not roles.are_set():
        return is_local(context)
    known = roles.is_logged_in(user) or is_local(context)
    return known and roles.includes(roles.role_of(user), "operate")


def is_local(context: Any) -> bool:
    """True if a visitor is on this machine. context: `st.context`.

    A request that came through a proxy is never taken for a local one: the operator says that there is one, it says so itself,
    or the browser's address, which proxies pass on as the origin, is not one of this machine.
    """
    if os.environ.get(PROXY) == "1" or context.ip_address is not None:
        return False
    headers = context.headers  # Streamlit reads them anew each time
    addresses = (headers.get("Origin"), f"//{headers.get('Host', HERE[0])}")
    return not any(name in headers for name in FORWARDED) and all(map(_is_here, filter(None, addresses)))


def _is_here(address: str) -> bool:
    try:
        return urlsplit(address).hostname in HERE
    except ValueError:
        return False


SWITCH = "SWITCHYARD_LOGIN"


@dataclass(frozen=True)
class Person:
    """name: as shown with their entries; empty while nobody has typed one
    known: True if logged in, so that the name is theirs
    """

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
    """The visitor's permanent name at their login: their address, else the provider's own id of them; None without a login."""
    if not roles.is_logged_in(st.user):
        return None
    own_id = " ".join(str(getattr(st.user, claim, "") or "") for claim in ("iss", "sub")).strip()
    return roles.email_of(st.user) or own_id or None


def reader() -> tuple[str, str] | None:
    """The name that this visitor's looks are kept under, a login or a typed name, and the name that they write under.

    None while neither is known.
    """
    name = who().name
    return (login() or name, name) if name else None


def _vouched() -> str:
    """Name and address from the login, as one line that can be kept."""
    email = roles.email_of(st.user)
    name = "".join(character for character in str(getattr(st.user, "name", "") or "") if character.isprintable()).strip()
    both = f"{name} ({email})" if name and email else name or email or str(getattr(st.user, "sub", "") or "somebody")
    return both if len(both) <= 120 else (email or name)[:120]


def _of_this_machine() -> str:
    """The name of the account that runs the studio, for a visitor on the same machine."""
    if not is_local(st.context):
        return ""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def why_not(needed: Role) -> str | None:
    """Why this visitor may not act in a role; None when they may."""
    person = who()
    if not roles.includes(person.role, needed):
        return f"Your role here is {person.role}: you may {roles.MEANING[person.role]}, not {roles.MEANING[needed]}."
    if not person.name:
        return "Set your name first, at the bottom left."
    return None


def allow(needed: Role) -> None:
    """Raise InputError when this visitor may not act in a role; a name is not asked for."""
    if not roles.includes(role := who().role, needed):
        raise InputError(f"your role here is {role}: you may {roles.MEANING[role]}, not {roles.MEANING[needed]}")


def writer(needed: Role) -> str:
    """The name under which this visitor writes. Raises InputError when they may not, no matter what a page has drawn."""
    if reason := why_not(needed):
        raise InputError(reason)
    return who().name


def admit() -> None:
    """Stop a run at the login when the operator wants everybody to log in."""
    if roles.is_logged_in(st.user) or os.environ.get(SWITCH) != "required":
        return
    st.header("Switchyard", anchor=False)
    if not _providers():
        st.error("The operator of this studio wants everybody to log in, but has not said where.", icon=":material/lock:")
        st.caption(f"{SWITCH}=required needs a section auth in the studio's secrets.toml; docs/team.md shows one.")
        st.stop()
    again = getattr(st.user, "is_logged_in", False)
    st.info("Your login has expired: log in again." if again else "Log in to see this studio.", icon=":material/lock:")
    _say_unreadable()
    if "plan" in st.query_params:
        st.caption("Your link leads to its plan once you are logged in.")
    _login()
    st.stop()


def lead_back() -> None:
    """After a login lead people back to their page; call after `st.navigation`.

    A fragment that the browser answers before it knows the page runs as if for another page, and the browser empties the one
    that it shows.
    """
    if roles.is_logged_in(st.user):
        _lead_back()


@st.fragment
def _lead_back() -> None:
    if not state.visit.back:
        components.return_to_address(lambda: state.visit.set(back=True))


def show() -> None:
    """The visitor, at the foot of the frame of every page, with the settings that they can change."""
    person = who()
    icon = ":material/account_circle:" if person.known else ":material/person:"
    name = plain(person.name) or "Your name"
    with st.popover(name, icon=icon, type="tertiary", key="people"):
        allowed = [roles.MEANING[role] for role in roles.ORDER if roles.includes(person.role, role)]
        st.caption(f"You may {'; '.join(allowed)}.")
        _say_unreadable()
        if may_operate(st.context, st.user):
            st.page_link("../pages/operate.py", label="Administration", icon=":material/monitor_heart:")
        if person.known:
            st.button("Log out", icon=":material/logout:", on_click=_log_out)
            return
        with st.form("people-name", border=False):
            name = st.text_input("Your name", person.name, max_chars=120, help="shown with your plans, comments and decisions")
            if st.form_submit_button("Set name", icon=":material/check:"):
                with failing.saying(sentence):
                    state.change(person=checked(name))
                    st.rerun()
        _login()


def remember() -> None:
    """Have the browser keep the typed name, or tell the one that it keeps."""
    if not who().known:
        components.remember_name(state.person(), _recall)


def session_owner() -> str | None:
    """The name under which a browser keeps the visitor's sessions: of a login, a digest; "" where nobody logs in.

    None: none are kept, as they would be the next person's.
    """
    if roles.is_logged_in(st.user):
        return digest_of(name)[:16] if (name := login()) else None
    return None if _providers() else ""


def _recall(name: str) -> None:
    with contextlib.suppress(InputError):  # the name in the browser is no longer allowed
        state.visit.recalled_person = checked(name)


def _log_out() -> None:
    state.visit.gone = True
    st.logout()


def _say_unreadable() -> None:
    """Name the operator's settings that cannot be read."""
    for read, then in (
        (roles.mapping, "nobody may do more than look"),
        (roles.login_hours, "nobody counts as logged in"),
        (team_approval.is_forbidden, "nobody may approve"),
    ):
        try:
            read()
        except InputError as error:
            st.error(plain(f"{error}: {then}."), icon=":material/error:")


def checked(name: str) -> str:
    """A typed name in the form that is kept. Raises InputError for one that cannot be, or that could be taken for a login's."""
    name = team.clean_name(name, "you")
    if "@" in name and _providers():
        raise InputError("a name with an e-mail address belongs to whoever logs in with it; log in or leave it out")
    return name


def _login() -> None:
    if _providers() and not state.visit.gone:
        components.note_address()
    for provider, label in _providers().items():
        if st.button(label, key=f"login-{provider}", icon=":material/login:"):
            try:
                st.login(provider)
            except StreamlitError as error:
                st.error(plain(f"the login does not work: {' '.join(str(error).split())}"), icon=":material/error:")


def _providers() -> dict[str, str]:
    """Providers at which people can log in: the name for `st.login`, and the text of its button."""
    if "is_logged_in" not in st.user:  # no login is configured
        return {}
    section = st.secrets["auth"]
    named = {provider: f"Log in with {provider}" for provider, value in section.items() if isinstance(value, Mapping)}
    return named if "client_id" not in section else {"default": "Log in"} | named


_LOG = logging.getLogger(f"{logs.OURS}.visitors")


@dataclass(frozen=True)
class Visitor:
    """since, seen: when the page was opened and last drawn, in seconds since the epoch"""

    person: Person
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
        person = who()
        _LOG.info("a visitor came", extra={"role": person.role, "login": person.known})
        before = Visitor(person, is_local(st.context), page, now, now)
    here[context.session_id] = replace(before, person=who(), page=page, seen=now)


def visitors() -> list[Visitor]:
    """Visitors with open pages, the last active first."""
    present = [visitor for id, visitor in list(_here().items()) if _is_open(id)]
    return sorted(present, key=lambda visitor: -visitor.seen)


def _is_open(id: str) -> bool:
    return Runtime.exists() and Runtime.instance().is_active_session(id)


@st.cache_resource(show_spinner=False)
def _here() -> dict[str, Visitor]:
    """Visitors by Streamlit's own id of a page, which opens nothing."""
    return {}
