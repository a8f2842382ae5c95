"""Whose is a decision: somebody else's, or of who asked? Told by logins; a typed name proves nothing, but tells who says so
themselves."""

import os
from collections.abc import Iterable
from typing import Literal, NamedTuple

from engine.errors import InputError

SETTING, ALLOWED, FORBIDDEN = "SWITCHYARD_SELF_APPROVAL", "allowed", "forbidden"
Whose = Literal[
    "by somebody else",
    "self-approved",
    "self-rejected",
    "self-approved (name typed, no login)",
    "self-rejected (name typed, no login)",
    "unverified: no login",
]
Decided = Literal["approved", "rejected"]


class Signature(NamedTuple):
    """What is known of a writer: the name beside what they wrote, and the login that vouches for it; None: there was none."""

    name: str
    login: str | None


def whose(verdict: Decided, behind: Iterable[Signature], decider: Signature) -> Whose:
    """Whose a decision is. behind: whoever saved the plan and whoever asked for the decision."""
    behind = tuple(behind)
    if decider.login is not None and decider.login in (writer.login for writer in behind):
        return f"self-{verdict}"
    if decider.login is None and any(_is_called_alike(writer, decider) for writer in behind):
        return f"self-{verdict} (name typed, no login)"
    is_known = None not in (decider.login, *(writer.login for writer in behind))
    return "by somebody else" if is_known else "unverified: no login"


def _is_called_alike(writer: Signature, decider: Signature) -> bool:
    """Whether both typed the same name."""
    return writer.login is None and writer.name.casefold() == decider.name.casefold()


def is_forbidden() -> bool:
    """Whether the operator wants approvals to be somebody else's. Raises InputError where the setting says neither."""
    wanted = os.environ.get(SETTING, "").strip() or ALLOWED
    if wanted not in (ALLOWED, FORBIDDEN):
        raise InputError(f"{SETTING} is '{wanted[:40]}'; give {ALLOWED} or {FORBIDDEN}")
    return wanted == FORBIDDEN


def why_not(behind: tuple[str | None, ...], approver: str | None) -> str | None:
    """Why this person may not approve; None when they may. behind: logins of whoever saved the plan and asked for the decision;
    approver: that of whoever approves; None: there is no login."""
    try:
        if not is_forbidden():
            return None
    except InputError as error:
        return f"{error}: until then nobody may approve"
    if approver is None:
        return "on this studio only people who are logged in may approve; log in first"
    if approver in behind:
        return "on this studio whoever saved a plan or asked for the decision may not approve it; ask somebody else"
    if None in behind:
        return (
            "this plan was saved or put up for decision without a login, so nobody knows by whom; save it again, logged in, "
            "in another workspace"
        )
    return None
