"""Who may start a launch, which runs programs on this machine."""

import os
from typing import Any

from app.visitor import roles

FORWARDED = ("X-Forwarded-For", "Forwarded", "X-Real-Ip")
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
    if not getattr(user, "is_logged_in", False):
        return "Log in to launch: this studio allows launches from other machines only to people it knows."
    return None


def is_local(context: Any) -> bool:
    """Whether a visitor is on this machine. context: `st.context`. A request that came through a proxy is never taken for a
    local one."""
    return context.ip_address is None and not any(name in context.headers for name in FORWARDED)
