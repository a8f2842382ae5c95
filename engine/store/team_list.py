"""The saved plans of a workspace as a list shows them: read without the inputs, figures and texts that most of a row is."""

from dataclasses import dataclass

from sqlalchemy import Connection, Row, Select, func, or_, select

from engine.store import tables
from engine.store.database import Database
from engine.store.team import State, Summary, Verdict, state_after
from engine.store.team_approval import Signature, Whose, whose
from engine.store.team_looks import News, news_by_review


@dataclass(frozen=True)
class ListedPlan:
    """A saved plan with how its newest review stands. number, plan, at: as of a `SavedPlan`; review: an id; state, review: None
    without one; whose: whose the last decision is, None unless it is decided; comments: how many its newest review has; news:
    what in it is new to whoever asks."""

    number: int
    plan: str
    name: str
    note: str
    by: str
    at: float
    summary: Summary
    review: str | None
    state: State | None
    whose: Whose | None
    comments: int
    news: News


def listed_plans(
    db: Database, workspace: str, search: str = "", reader: tuple[str, str] | None = None
) -> list[ListedPlan]:
    """The plans of a workspace, newest first; search: a part of name, note, author, cluster, recording or id; reader: what a
    person's looks are kept under, and the name that they write under, None: to nobody anything is new."""
    c = tables.saved_plan.c
    summary = (c.cluster, c.recording, c.seconds, c.deployed_seconds, c.deployed)
    query = select(c.number, c.plan, c.name, c.note, c.by, c.at, *summary).where(c.workspace == workspace)
    if part := search.strip():
        columns = (c.name, c.note, c.by, c.cluster, c.recording, c.plan)
        query = query.where(or_(*(column.icontains(part, autoescape=True) for column in columns)))
    with db.reading() as connection:
        rows = connection.execute(query.order_by(c.at.desc(), c.number.desc())).all()
        newest = _newest_reviews(connection, workspace)
        decided = _last_decisions(connection, workspace)
        comments = _counts(connection, workspace)
        news = news_by_review(connection, newest.values(), *reader) if reader else {}
    return [
        ListedPlan(
            *row[:6],
            Summary(*row[6:]),
            review := newest.get(row.number),
            state_after(decided[review].verdict if review in decided else None) if review else None,
            decided[review].whose if review in decided else None,
            comments.get(review, 0),
            news.get(review, News()),
        )
        for row in rows
    ]


@dataclass(frozen=True)
class _Decided:
    verdict: Verdict
    whose: Whose | None


def _newest_reviews(connection: Connection, workspace: str) -> dict[int, str]:
    """Id of the newest review by the number of its saved plan."""
    c = tables.review.c
    rows = connection.execute(_of_workspace(select(c.saved, c.id), workspace).order_by(c.at, c.id.desc()))
    return {row.saved: row.id for row in rows}


def _last_decisions(connection: Connection, workspace: str) -> dict[str, _Decided]:
    """What was decided last by review."""
    c, review, saved = tables.decision.c, tables.review.c, tables.saved_plan.c
    behind = (
        saved.by.label("saved_by"),
        saved.login.label("saved_login"),
        review.by.label("asked_by"),
        review.login.label("asked_login"),
    )
    query = select(c.review, c.verdict, c.by, c.login, *behind).join(tables.review, review.id == c.review)
    last = {row.review: row for row in connection.execute(_of_workspace(query, workspace).order_by(c.number))}
    return {id: _Decided(row.verdict, _whose(row)) for id, row in last.items()}


def _whose(row: Row) -> Whose | None:
    if row.verdict == "reopened":
        return None
    behind = Signature(row.saved_by, row.saved_login), Signature(row.asked_by, row.asked_login)
    return whose(row.verdict, behind, Signature(row.by, row.login))


def _counts(connection: Connection, workspace: str) -> dict[str, int]:
    """How many comments by review."""
    c = tables.comment.c
    query = select(c.review, func.count()).join(tables.review, tables.review.c.id == c.review).group_by(c.review)
    return {row.review: row[1] for row in connection.execute(_of_workspace(query, workspace))}


def _of_workspace(query: Select, workspace: str) -> Select:
    """The rows of a query with reviews in it whose plan is saved in a workspace."""
    saved = tables.saved_plan.c
    return query.join(tables.saved_plan, saved.number == tables.review.c.saved).where(saved.workspace == workspace)
