"""The team's work: workspaces, the plans saved in them, reviews with comments and decisions, and runs.

Every function takes the database first. Names and texts are checked here: they come from people.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal, cast

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from engine.errors import InputError
from engine.plan import Plan
from engine.store import tables
from engine.store.database import Database
from engine.store.team_approval import Place, Signature, Whose, place_of, whose, why_not

LONGEST_TEXT = 20_000
State = Literal["open", "approved", "rejected"]
Verdict = Literal["approved", "rejected", "reopened"]


@dataclass(frozen=True)
class Workspace:
    """A folder of plans. at: seconds since the epoch, here and below."""

    id: str
    name: str
    by: str
    at: float


@dataclass(frozen=True)
class Summary:
    """The entry of a saved plan in a list; None: not known.

    cluster, recording: names
    seconds: simulated, when it was saved
    deployed_seconds: simulated, of the baseline deployed then
    deployed: name of that baseline
    headline: speed relative to that baseline, held out where something was; see `engine.compare.standing.Standing.gain`
    span: of the seconds, see `engine.compare.standing.Span`
    """

    cluster: str | None = None
    recording: str | None = None
    seconds: float | None = None
    deployed_seconds: float | None = None
    deployed: str | None = None
    headline: float | None = None
    span: str | None = None

    @property
    def gain(self) -> float | None:
        """Speed relative to the deployed baseline, by the times where nobody noted it; None if either is not known or zero."""
        if self.headline is not None:
            return self.headline
        return self.deployed_seconds / self.seconds if self.deployed_seconds and self.seconds else None


UNKNOWN = Summary()


@dataclass(frozen=True)
class SavedPlan:
    """A plan in a workspace.

    plan, parent: ids
    inputs: JSON by role, enough to open the problem again if its recordings are there
    figures: those of the simulation when it was saved
    """

    number: int
    workspace: str
    plan: str
    parent: str | None
    name: str
    note: str
    inputs: dict[str, Any]
    figures: dict[str, Any]
    by: str
    at: float
    login: str | None = None


@dataclass(frozen=True)
class Comment:
    """A comment in a review. place: the place that it points to."""

    by: str
    at: float
    text: str
    place: Place | None = None


@dataclass(frozen=True)
class Decision:
    by: str
    at: float
    verdict: Verdict
    reason: str
    login: str | None = None


@dataclass(frozen=True)
class ThresholdChange:
    """A new decision of the verdict on a plan with other thresholds.

    before, after: thresholds by name
    """

    by: str
    at: float
    before: dict[str, float]
    after: dict[str, float]


@dataclass(frozen=True)
class Review:
    """A plan put up for decision.

    comments, decisions, thresholds: oldest first
    """

    id: str
    saved: SavedPlan
    question: str
    by: str
    at: float
    comments: tuple[Comment, ...]
    decisions: tuple[Decision, ...]
    thresholds: tuple[ThresholdChange, ...] = ()
    login: str | None = None

    @property
    def behind(self) -> tuple[str | None, str | None]:
        """Logins of those who saved the plan and asked for the decision."""
        return self.saved.login, self.login

    def whose(self, decision: Decision) -> Whose | None:
        """The standing of one of its decisions; None: it decided nothing."""
        if decision.verdict == "reopened":
            return None
        behind = Signature(self.saved.by, self.saved.login), Signature(self.by, self.login)
        return whose(decision.verdict, behind, Signature(decision.by, decision.login))

    @property
    def whose_last(self) -> Whose | None:
        """The standing of the last decision; None without any."""
        return self.whose(self.decisions[-1]) if self.decisions else None

    @property
    def overruled(self) -> Decision | None:
        """Somebody else's decision that the last decision reverses, unless they reopened it themselves."""
        for before, then in reversed(list(pairwise(self.decisions))):
            if before.verdict != "reopened":
                others = before.by not in (then.by, self.decisions[-1].by)
                return before if others and before.verdict != self.decisions[-1].verdict else None
        return None

    @property
    def state(self) -> State:
        """The state after the last decision."""
        return state_after(self.decisions[-1].verdict if self.decisions else None)


def state_after(verdict: Verdict | None) -> State:
    """The state of a review after its last decision; None: nothing was decided yet."""
    return "open" if verdict in (None, "reopened") else cast(State, verdict)


@dataclass(frozen=True)
class Run:
    """A launch of a plan.

    predicted, measured: seconds, None if it did not finish
    """

    id: str
    plan: str
    place: str
    predicted: float | None
    measured: float | None
    report: dict[str, Any]
    by: str
    at: float


def add_workspace(db: Database, name: str, by: str) -> Workspace:
    """Make a new, empty workspace."""
    workspace = Workspace(secrets.token_urlsafe(9), clean_name(name, "the workspace"), **signed(by))
    with db.writing() as connection:
        connection.execute(insert(tables.workspace).values(**vars(workspace)))
    return workspace


def workspaces(db: Database) -> list[Workspace]:
    """All workspaces by name."""
    with db.reading() as connection:
        rows = connection.execute(select(tables.workspace).order_by(func.lower(tables.workspace.c.name)))
        return [Workspace(*row) for row in rows]


def save_plan(
    db: Database,
    workspace: str,
    plan: Plan,
    by: str,
    note: str = "",
    inputs: dict[str, Any] | None = None,
    figures: dict[str, Any] | None = None,
    summary: Summary = UNKNOWN,
    login: str | None = None,
) -> SavedPlan:
    """Save a plan in a workspace; one that is there already stays as it was first saved, as a plan never changes.
    login: the writer's id at the login, here and below."""
    row = {
        "workspace": workspace,
        "plan": plan.id,
        "name": clean_name(plan.name, "the plan"),
        "note": clean_text(note, "the note", empty=True),
        "inputs": inputs or {},
        "figures": figures or {},
        **signed(by),
        "login": login,
        **vars(summary),
    }
    with db.writing() as connection:
        _has(connection, tables.workspace.c.id, workspace, "workspace")
        _keep_plan(connection, plan)
        _insert_new(connection, tables.saved_plan, row)
        where = (tables.saved_plan.c.workspace == workspace, tables.saved_plan.c.plan == plan.id)
        return SavedPlan(*connection.execute(_saved_plans().where(*where)).one())


def saves_of(db: Database, plans: Sequence[str]) -> list[SavedPlan]:
    """All saves of these plans (ids), in any workspace, newest first."""
    c = tables.saved_plan.c
    with db.reading() as connection:
        rows = connection.execute(_saved_plans().where(c.plan.in_(plans)).order_by(c.at.desc(), c.number.desc()))
        return [SavedPlan(*row) for row in rows]


def find_saved(db: Database, number: int) -> SavedPlan:
    """The saved plan with this number. Raises InputError if there is none."""
    with db.reading() as connection:
        row = connection.execute(_saved_plans().where(tables.saved_plan.c.number == number)).first()
    if row is None:
        raise InputError("this saved plan is not in the database; reload the page")
    return SavedPlan(*row)


def keep_plan(db: Database, plan: Plan) -> None:
    """Keep a plan that others refer to, such as the one in use, in no workspace."""
    with db.writing() as connection:
        _keep_plan(connection, plan)


def load_plan(db: Database, id: str) -> Plan:
    """The plan with this id. Raises InputError if nobody saved it."""
    with db.reading() as connection:
        body = connection.scalar(select(tables.plan.c.body).where(tables.plan.c.id == id))
    if body is None:
        raise InputError(f"there is no saved plan {id[:12]!r}; the link may be of another database")
    return Plan.from_json(body, f"saved plan {id[:12]}")


def children(db: Database, plan: str) -> list[str]:
    """Ids of the saved plans that were derived from a plan."""
    with db.reading() as connection:
        rows = connection.scalars(select(tables.plan.c.id).where(tables.plan.c.parent == plan).order_by(tables.plan.c.id))
        return list(rows)


def open_review(db: Database, saved: int, question: str, by: str, login: str | None = None) -> Review:
    """Put a saved plan up for decision; saved: its number."""
    asked = {"question": clean_text(question, "the question"), **signed(by), "login": login}
    row = {"id": secrets.token_urlsafe(9), "saved": saved, **asked}
    with db.writing() as connection:
        _has(connection, tables.saved_plan.c.number, saved, "saved plan")
        connection.execute(insert(tables.review).values(**row))
        return _reviews(connection, tables.review.c.id == row["id"])[0]


def add_comment(db: Database, review: str, text: str, by: str, place: Place | None = None) -> None:
    """Add a comment to a review. place: the place that it points to; None: the plan as a whole."""
    said = {"text": clean_text(text, "the comment"), **signed(by)}
    row = {"review": review, "place": None if place is None else str(place), **said}
    with db.writing() as connection:
        _has(connection, tables.review.c.id, review, "review")
        connection.execute(insert(tables.comment).values(**row))


def decide(
    db: Database, review: str, verdict: Verdict, reason: str, by: str, seen: int | None = None, login: str | None = None
) -> None:
    """Approve, reject or reopen; earlier decisions stay in the history. Raises InputError if there are more decisions
    than seen, and if the operator forbids that people approve a plan that they saved or asked for.

    seen: number of decisions that the decider knew of, if that is known
    """
    if verdict == "rejected" and not reason.strip():
        raise InputError("give a reason before rejecting")
    why = clean_text(reason, "the reason", empty=True)
    row = {"review": review, "verdict": verdict, "reason": why, **signed(by), "login": login}
    with db.writing() as connection:
        # Another decider at the same moment waits here, and then sees this decision.
        connection.execute(select(tables.review.c.id).where(tables.review.c.id == review).with_for_update())
        _has(connection, tables.review.c.id, review, "review")
        before = (now := _reviews(connection, tables.review.c.id == review)[0]).decisions
        if verdict == "approved" and (refusal := why_not(now.behind, login)):
            raise InputError(refusal)
        if seen is not None and len(before) > seen:
            last = before[-1]
            raise InputError(f"{last.by} has just {last.verdict} this; look at it again before you decide")
        connection.execute(insert(tables.decision).values(**row))


def note_thresholds(db: Database, plan: str, before: dict[str, float], after: dict[str, float], by: str) -> None:
    """Keep with every review of a plan (its id) that the verdict on it was decided again by other thresholds."""
    row = {"before": before, "after": after, **signed(by)}
    saved = tables.saved_plan.c
    of_plan = select(tables.review.c.id).join(tables.saved_plan, saved.number == tables.review.c.saved)
    with db.writing() as connection:
        for review in connection.scalars(of_plan.where(saved.plan == plan)).all():
            connection.execute(insert(tables.threshold_change).values(review=review, **row))


def find_review(db: Database, id: str) -> Review:
    """One review with all its entries. Raises InputError if there is none."""
    with db.reading() as connection:
        reviews = _reviews(connection, tables.review.c.id == id)
    if not reviews:
        raise InputError(f"there is no review {id[:16]!r}; the link may be of another database")
    return reviews[0]


def reviews_of(db: Database, saved: int) -> list[Review]:
    """The reviews of a saved plan (its number), newest first."""
    with db.reading() as connection:
        return _reviews(connection, tables.review.c.saved == saved)


def pulse(db: Database) -> tuple[int, ...]:
    """Numbers that change whenever anything is added, comments left out; cheap enough to ask for every few seconds."""
    counted = (tables.workspace, tables.saved_plan, tables.review, tables.decision, tables.threshold_change, tables.run)
    counts = (select(func.count()).select_from(table).scalar_subquery() for table in counted)
    with db.reading() as connection:
        return tuple(connection.execute(select(*counts)).one())


def note_run(
    db: Database,
    id: str,
    plan: Plan,
    place: str,
    by: str,
    at: float,
    predicted: float | None,
    measured: float | None,
    report: dict[str, Any],
) -> None:
    """Keep a finished launch; to note it again changes nothing."""
    row = {"id": id, "plan": plan.id, "place": place, "predicted": predicted, "measured": measured, "report": report}
    row |= {"by": clean_name(by, "you"), "at": at}
    with db.writing() as connection:
        _keep_plan(connection, plan)
        _insert_new(connection, tables.run, row)


def runs(db: Database, plan: str | None = None) -> list[Run]:
    """All runs, or those of a plan, newest first."""
    c = tables.run.c
    query = select(c.id, c.plan, c.place, c.predicted, c.measured, c.report, c.by, c.at).order_by(c.at.desc(), c.id)
    with db.reading() as connection:
        return [Run(*row) for row in connection.execute(query if plan is None else query.where(c.plan == plan))]


def _saved_plans() -> Select:
    """A query for rows with the fields of `SavedPlan`, in their order."""
    c = tables.saved_plan.c
    columns = (tables.plan.c.parent if field.name == "parent" else c[field.name] for field in fields(SavedPlan))
    return select(*columns).join(tables.plan, tables.plan.c.id == c.plan)


def _reviews(connection: Connection, which: ColumnElement[bool]) -> list[Review]:
    c, saved = tables.review.c, tables.saved_plan.c
    query = select(c.id, c.saved, c.question, c.by, c.at, c.login).join(tables.saved_plan, saved.number == c.saved).where(which)
    rows = connection.execute(query.order_by(c.at.desc(), c.id)).all()
    of_plans = _saved_plans().where(saved.number.in_({row.saved for row in rows}))
    plans = {row.number: SavedPlan(*row) for row in connection.execute(of_plans)}
    ids = [row.id for row in rows]
    said, decided, changed = (
        _entries(connection, table, ids, entry)
        for table, entry in (
            (tables.comment, lambda row: Comment(row.by, row.at, row.text, place_of(row.place) if row.place else None)),
            (tables.decision, lambda row: Decision(row.by, row.at, row.verdict, row.reason, row.login)),
            (tables.threshold_change, lambda row: ThresholdChange(row.by, row.at, row.before, row.after)),
        )
    )
    return [
        Review(id, plans[saved], question, by, at, said[id], decided[id], changed[id], login)
        for id, saved, question, by, at, login in rows
    ]


def _entries(
    connection: Connection, table: Table, reviews: Sequence[str], entry: Callable[[Row], Any]
) -> dict[str, tuple[Any, ...]]:
    """The entries of these reviews in a table, oldest first, by review."""
    entries = dict.fromkeys(reviews, ())
    for row in connection.execute(select(table).where(table.c.review.in_(reviews)).order_by(table.c.number)):
        entries[row.review] += (entry(row),)
    return entries


def _keep_plan(connection: Connection, plan: Plan) -> None:
    _insert_new(connection, tables.plan, {"id": plan.id, "body": plan.to_json(), "parent": plan.parent})


def _insert_new(connection: Connection, table, row: dict[str, Any]) -> None:
    """Add a row unless one with its key is there."""
    dialect = {"sqlite": sqlite, "postgresql": postgresql}[connection.dialect.name]
    connection.execute(dialect.insert(table).values(**row).on_conflict_do_nothing())


def _has(connection: Connection, column: ColumnElement, value: str | int, what: str) -> None:
    if connection.scalar(select(column).where(column == value)) is None:
        raise InputError(f"this {what} is not in the database; reload the page")


def signed(by: str) -> dict[str, Any]:
    """The maker and the time of a row that is written now."""
    return {"by": clean_name(by, "you"), "at": time.time()}


def clean_name(name: str, whose: str) -> str:
    """A name as it is kept: one line without control characters. Raises InputError for one that cannot be kept."""
    cleaned = " ".join(name.split())
    if not cleaned or len(cleaned) > tables.NAME or not cleaned.isprintable():
        raise InputError(f"the name of {whose} must have 1 to {tables.NAME} characters, on one line")
    return cleaned


def clean_text(text: str, what: str, empty: bool = False) -> str:
    """A text as it is kept. Raises InputError for one that cannot be kept."""
    cleaned = text.strip()
    if not cleaned and not empty:
        raise InputError(f"{what} is empty")
    if len(cleaned) > LONGEST_TEXT:
        raise InputError(f"{what} has {len(cleaned):,} characters, at most {LONGEST_TEXT:,} are kept")
    if "\x00" in cleaned:
        raise InputError(f"{what} has a NUL character in it, which cannot be kept")
    return cleaned
