"""Roles of people: view, plan or launch; each includes those before it."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any, Literal, get_args

from engine.errors import InputError

Role = Literal["view", "plan", "launch", "operate"]
ORDER: tuple[Role, ...] = get_args(Role)
SETTING, DEFAULT = "SWITCHYARD_ROLES", "default"
HOURS, USUAL_HOURS = "SWITCHYARD_LOGIN_HOURS", 12.0
UNSET: Role = "launch"
"""Everybody's role without a setting; looking after the studio is then left to people on its machine."""
MEANING = {
    "view": "look at plans, reviews and reports",
    "plan": "make and save plans, discuss and decide",
    "launch": "start launches",
    "operate": "look after the studio",
}


def role_of(user: Any) -> Role:
    """The role of a visitor. user: `st.user`.

    The operator's setting gives roles by e-mail address, and one to everybody else. Without a setting everybody may plan and
    launch; with one that cannot be read nobody may do more than look.
    """
    try:
        roles = mapping()
    except InputError:
        return ORDER[0]
    return roles.get(email_of(user), roles[DEFAULT])


def is_logged_in(user: Any) -> bool:
    """True if a login vouches for the visitor, and did so lately. user: `st.user`.

    Streamlit's own cookie would hold for thirty days, also for people whom the provider has shut out since. Nobody is logged in
    with a setting that cannot be read.
    """
    if not getattr(user, "is_logged_in", False):
        return False
    issued = getattr(user, "iat", None)
    try:
        return not isinstance(issued, int | float) or time.time() < issued + login_hours() * 3600
    except InputError:
        return False


def login_hours() -> float:
    """Hours for which a login counts. Raises InputError if the setting is no such number."""
    text = os.environ.get(HOURS, "").strip()
    if not text:
        return USUAL_HOURS
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 < hours < math.inf:
        raise InputError(f"{HOURS} is '{text[:40]}'; give a number of hours above 0")
    return hours


def email_of(user: Any) -> str:
    """The visitor's address as the login's provider vouches for it, in lower case; empty when there is none."""
    if not is_logged_in(user) or getattr(user, "email_verified", True) is False:
        return ""
    return str(getattr(user, "email", "") or "").strip().lower()


def are_set() -> bool:
    """True if the operator gave roles to people."""
    return bool(os.environ.get(SETTING, "").strip())


def mapping() -> dict[str, Role]:
    """Roles by e-mail address in lower case; under "default" the role of everybody else. Raises InputError when the setting,
    JSON or the path of a JSON file, cannot be read."""
    text = os.environ.get(SETTING, "").strip()
    if not text:
        return {DEFAULT: UNSET}
    try:
        role_of = json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{SETTING} is neither JSON nor the path of a readable JSON file") from None
    if not isinstance(role_of, dict):
        raise InputError(f"{SETTING} must map e-mail addresses to roles")
    for address, role in role_of.items():
        if role not in ORDER:
            raise InputError(f"{SETTING}: the role of {address} is not one of {', '.join(ORDER)}")
    return {DEFAULT: ORDER[0]} | {address.strip().lower(): role for address, role in role_of.items()}


def includes(role: Role, needed: Role) -> bool:
    """True if a role includes another one."""
    return ORDER.index(role) >= ORDER.index(needed)
