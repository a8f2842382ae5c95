"""What a person may do: view, plan or launch, each with all that stands before it."""

import json
import os
from pathlib import Path
from typing import Any, Literal, get_args

from engine.errors import InputError

Role = Literal["view", "plan", "launch"]
ORDER: tuple[Role, ...] = get_args(Role)
SETTING, DEFAULT = "SWITCHYARD_ROLES", "default"
MEANING = {
    "view": "look at plans, reviews and reports",
    "plan": "make and save plans, discuss and decide",
    "launch": "start launches",
}


def role_of(user: Any) -> Role:
    """The role of a visitor. user: `st.user`.

    The operator's setting gives roles by e-mail address, and one to everybody else. Without a setting everybody may do
    everything; with one that cannot be read nobody may do more than look.
    """
    try:
        roles = mapping()
    except InputError:
        return ORDER[0]
    return roles.get(email_of(user), roles[DEFAULT])


def email_of(user: Any) -> str:
    """The address that whoever logged the visitor in vouches for, in lower case; empty when there is none."""
    if not getattr(user, "is_logged_in", False) or getattr(user, "email_verified", True) is False:
        return ""
    return str(getattr(user, "email", "") or "").strip().lower()


def mapping() -> dict[str, Role]:
    """Roles by e-mail address in lower case, and under "default" that of everybody else. Raises InputError when the
    setting, JSON or the path of a JSON file, cannot be read."""
    text = os.environ.get(SETTING, "").strip()
    if not text:
        return {DEFAULT: ORDER[-1]}
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
    """Whether a role may do what another one may."""
    return ORDER.index(role) >= ORDER.index(needed)
