"""Did somebody else approve? Told by logins alone: a typed name proves nothing."""

import os
from typing import Literal

from engine.errors import InputError

SETTING, ALLOWED, FORBIDDEN = "SWITCHYARD_SELF_APPROVAL", "allowed", "forbidden"
Approval = Literal["by somebody else", "self-approved", "unverified: no login"]


def approval_of(behind: tuple[str | None, ...], approver: str | None) -> Approval:
    """Who approved. behind: logins of whoever saved the plan and asked for the decision; approver: that of whoever approved;
    None: there was no login."""
    if approver is not None and approver in behind:
        return "self-approved"
    return "unverified: no login" if None in (*behind, approver) else "by somebody else"


def is_forbidden() -> bool:
    """Whether the operator wants approvals to be somebody else's. Raises InputError where the setting says neither."""
    wanted = os.environ.get(SETTING, "").strip() or ALLOWED
    if wanted not in (ALLOWED, FORBIDDEN):
        raise InputError(f"{SETTING} is '{wanted[:40]}'; give {ALLOWED} or {FORBIDDEN}")
    return wanted == FORBIDDEN


def why_not(behind: tuple[str | None, ...], approver: str | None) -> str | None:
    """Why this person may not approve; None when they may. The arguments are those of `approval_of`."""
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
