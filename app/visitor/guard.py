"""Who may start a launch, which runs programs on this machine, and who may look after the studio."""

import os
from typing import Any
from urllib.parse import urlsplit

from app.visitor import roles

FORWARDED = (
    *("Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Server"),
    *("X-Real-Ip", "X-Client-Ip", "True-Client-Ip", "Cf-Connecting-Ip", "Fly-Client-Ip", "X-Envoy-External-Address"),
)
"""Headers that proxies add."""
PROXY = "SWITCHYARD_PROXY"
"""Environment variable: 1 where a proxy stands before the studio, so that no request is a local one."""
HERE = ("localhost", "127.0.0.1", "::1")
SWITCH = "SWITCHYARD_REMOTE_LAUNCH"


def why_not(context: Any, user: Any) -> str | None:
    """None when this visitor may launch, otherwise the reason for people.

    context, user: `st.context` and `st.user`. Visitors on this machine may; others only when the operator has switched
    remote launches on and they have logged in. Nobody may whose role is less.
    """
    if not roles.includes(role := roles.role_of(user), "launch"):
        return f"Your role here is {role}: you may not {roles.MEANING['launch']}."
    if is_local(context):
        return None
    if os.environ.get(SWITCH) != "1":
        return (
            "Launching is off for visitors who are not on this machine. "
            f"The operator can allow it with {SWITCH}=1 and a login."
        )
    if not roles.is_logged_in(user):
        return "Log in to launch: this studio allows launches from other machines only to people it knows."
    return None


def may_operate(context: Any, user: Any) -> bool:
    """Whether this visitor may see the operator's page: whoever has the role and logged in or is on this machine, and without
    any roles whoever is on this machine. context, user: as for `why_not`."""
    if not roles.are_set():
        return is_local(context)
    known = roles.is_logged_in(user) or is_local(context)
    return known and roles.includes(roles.role_of(user), "operate")


def is_local(context: Any) -> bool:
    """Whether a visitor is on this machine. context: `st.context`. A request that came through a proxy is never taken for a
    local one: the operator says that there is one, it says so itself, or the browser's address, which proxies pass on as
    the origin, is not one of this machine."""
    if os.environ.get(PROXY) == "1" or context.ip_address is not None:
        return False
    addresses = (context.headers.get("Origin"), f"//{context.headers.get('Host', HERE[0])}")
    return not any(name in context.headers for name in FORWARDED) and all(map(_is_here, filter(None, addresses)))


def _is_here(address: str) -> bool:
    try:
        return urlsplit(address).hostname in HERE
    except ValueError:
        return False
