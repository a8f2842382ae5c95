"""The standing of a decision (by somebody else, or by a person behind the plan), and the place that a comment points
to. Logins tell persons apart; a typed name proves nothing, but reveals people who say so themselves."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

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

Kind = Literal["layer", "hops", "gpu", "chart"]
CHARTS = ("verdict", "timelines", "load")
_WRITTEN = re.compile(rf"(layer|hops|gpu):(0|[1-9]\d{{0,5}})|(chart):({'|'.join(CHARTS)})", re.ASCII)


class Signature(NamedTuple):
    """The known facts on a writer: the name under the text, and the login that vouches for it; None: there was none."""

    name: str
    login: str | None


def whose(verdict: Decided, behind: Iterable[Signature], decider: Signature) -> Whose:
    """The standing of a decision. behind: those who saved the plan and asked for the decision."""
    behind = tuple(behind)
    if decider.login is not None and decider.login in (writer.login for writer in behind):
        return f"self-{verdict}"
    names = [writer.name.casefold() for writer in behind if writer.login is None]  # typed
    if decider.login is None and decider.name.casefold() in names:
        return f"self-{verdict} (name typed, no login)"
    is_known = None not in (decider.login, *(writer.login for writer in behind))
    return "by somebody else" if is_known else "unverified: no login"


def is_forbidden() -> bool:
    """True if the operator forbids that people approve their own plans. Raises InputError if the setting is neither value."""
    wanted = os.environ.get(SETTING, "").strip() or ALLOWED
    if wanted not in (ALLOWED, FORBIDDEN):
        raise InputError(f"{SETTING} is '{wanted[:40]}'; give {ALLOWED} or {FORBIDDEN}")
    return wanted == FORBIDDEN


def why_not(behind: tuple[str | None, ...], approver: str | None) -> str | None:
    """The reason why this person may not approve; None if they may.

    behind: logins of those who saved the plan and asked for the decision
    approver: login of the approver; None: there is no login
    """
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


@dataclass(frozen=True)
class Place:
    """A place in the brief, written as `layer:3` or `chart:load`: a layer, the hops from it to the next one, a GPU, or a chart.

    number: of the MoE layer, or the GPU
    chart: its name
    """

    kind: Kind
    number: int = 0
    chart: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.chart or self.number}"


def place_of(text: str) -> Place:
    """The place in a comment or a link. Raises InputError for any other text."""
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise InputError(f"{text[:40]!r} is no layer, GPU or chart that a comment can point to")
    kind, number, chart, name = match.groups()
    return Place("chart", chart=name) if chart else Place(cast(Kind, kind), int(number))
