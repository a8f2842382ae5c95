"""Tells the operator's webhook that a decision is asked for, or was made; see docs/operating.md for what is sent."""

from contextlib import suppress
from datetime import UTC, datetime

from app.review.address import link_to
from engine.errors import InputError
from engine.store import team
from engine.store.database import database
from engine.store.team import Review, Verdict
from engine.webhook import WEBHOOK, address

LONGEST = 500
"""Characters of a text that are sent."""


def requested(review: Review) -> None:
    """A plan was put up for decision."""
    _send("review.requested", "A decision on a plan is requested", review, review.by)


def decided(review: Review, verdict: Verdict, reason: str, by: str) -> None:
    """Somebody has decided on a plan."""
    _send("review.decided", f"A plan was {verdict}", review, by, verdict, reason)


def _send(event: str, text: str, review: Review, by: str, verdict: Verdict | None = None, reason: str = "") -> None:
    with suppress(InputError):  # what is wrong with the setting, or the database now, the operator is told elsewhere
        if address() is None:
            return
        saved, link = review.saved, link_to(review.saved, review.id)
        names = {workspace.id: workspace.name for workspace in team.workspaces(database())}
        WEBHOOK.send(
            {
                "event": event,
                "text": f"{text}: {link}",  # nothing that a person wrote: chat services read it as markup
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "workspace": names.get(saved.workspace, ""),
                "plan": {"id": saved.plan, "name": saved.name},
                "review": review.id,
                "question": _short(review.question),
                "by": by,
                "verdict": verdict,
                "reason": _short(reason),
                "link": link,
            }
        )


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
