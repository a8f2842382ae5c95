"""The saved plans of a workspace as a list shows them, read without their large inputs, figures and texts; the news for
a person since their last look at a review; and the correction of a saved plan's name and note by its saver."""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, Row, Select, Table, and_, case, func, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from engine.errors import InputError
from engine.store import tables, team
from engine.store.database import Database
from engine.store.team_approval import Signature, Whose, whose


@dataclass(frozen=True)
class News:
    """Numbers of new entries. unseen: nobody of this name has looked at the review yet, so that it is new as a whole."""

    comments: int = 0
    decisions: int = 0
    thresholds: int = 0
    unseen: bool = False

    def __bool__(self) -> bool:
        return self.unseen or bool(self.comments or self.decisions or self.thresholds)


def last_look(db: Database, who: str, review: str) -> float | None:
    """Seconds since the epoch of a person's last look at a review; None: never."""
    c = tables.look.c
    with db.reading() as connection:
        return connection.scalar(select(c.at).where(c.who == who, c.review == review))


def note_look(db: Database, who: str, review: str, at: float) -> None:
    """Note that a person has seen all of a review that was there at a moment."""
    with db.writing() as connection:
        dialect = {"sqlite": sqlite, "postgresql": postgresql}[connection.dialect.name]
        row = dialect.insert(tables.look).values(who=who, review=review, at=at)
        connection.execute(row.on_conflict_do_update(index_elements=["who", "review"], set_={"at": at}))


def news_of(review: team.Review, name: str, since: float | None) -> News:
    """The additions of others than `name` to a review since a look; None: never looked."""
    if since is None:
        return News(unseen=review.by != name)
    kinds = (team.Comment, team.Decision, team.ThresholdChange)
    entries = (*review.comments, *review.decisions, *review.thresholds)
    new = [entry for entry in entries if entry.at > since and entry.by != name]
    return News(*(sum(isinstance(entry, kind) for entry in new) for kind in kinds))


def newest(review: team.Review) -> float:
    """Seconds since the epoch of the last addition to a review."""
    return max(entry.at for entry in (review, *review.comments, *review.decisions, *review.thresholds))


def news_by_review(connection: Connection, reviews: Iterable[str], who: str, name: str) -> dict[str, News]:
    """The news for a person, of those of these reviews that have some.

    who: key of the person's looks
    name: the person's name as a writer
    """
    wanted = list(reviews)
    c = tables.review.c
    look = and_(tables.look.c.review == c.id, tables.look.c.who == who)
    looks = select(c.id, c.by, tables.look.c.at).outerjoin(tables.look, look).where(c.id.in_(wanted))
    counts = [_new(connection, table, who, name) for table in (tables.comment, tables.decision, tables.threshold_change)]
    news = {}
    for row in connection.execute(looks):
        news[row.id] = News(unseen=row.by != name) if row.at is None else News(*(count.get(row.id, 0) for count in counts))
    return {id: new for id, new in news.items() if new}


def _new(connection: Connection, table: Table, who: str, name: str) -> dict[str, int]:
    """Number of rows of a table that others have added since a person's look, by review."""
    seen = and_(tables.look.c.review == table.c.review, tables.look.c.who == who)
    query = (
        select(table.c.review, func.sum(case((table.c.by != name, 1), else_=0)))
        .join(tables.look, seen)
        .where(table.c.at > tables.look.c.at)
        .group_by(table.c.review)
    )
    return {row[0]: int(row[1]) for row in connection.execute(query)}


@dataclass(frozen=True)
class ListedPlan:
    """A saved plan with the state of its newest review.

    number, plan, at: as of a `SavedPlan`
    review: an id, None without one
    state: None without a review
    whose: standing of the last decision, None unless it is decided
    comments: number in its newest review
    news: in that review, for the reader of the list
    """

    number: int
    plan: str
    name: str
    note: str
    by: str
    at: float
    summary: team.Summary
    review: str | None
    state: team.State | None
    whose: Whose | None
    comments: int
    news: News


def listed_plans(db: Database, workspace: str, search: str = "", reader: tuple[str, str] | None = None) -> list[ListedPlan]:
    """The plans of a workspace, newest first.

    search: a part of name, note, author, cluster, recording or id
    reader: key of a person's looks, and the name that they write under; None: nothing is new
    """
    c = tables.saved_plan.c
    summary = (c.cluster, c.recording, c.seconds, c.deployed_seconds, c.deployed, c.headline, c.span)
    query = select(c.number, c.plan, c.name, c.note, c.by, c.at, *summary).where(c.workspace == workspace)
    if part := search.strip():
        columns = (c.name, c.note, c.by, c.cluster, c.recording, c.plan)
        query = query.where(or_(*(column.icontains(part, autoescape=True) for column in columns)))
    with db.reading() as connection:
        rows = connection.execute(query.order_by(c.at.desc(), c.number.desc())).all()
        of_review = tables.review.c
        asked = _of_workspace(select(of_review.saved, of_review.id), workspace).order_by(of_review.at, of_review.id.desc())
        newest = {row.saved: row.id for row in connection.execute(asked)}  # the last one counts
        decided = _last_decisions(connection, workspace)
        c = tables.comment.c
        query = select(c.review, func.count()).join(tables.review, tables.review.c.id == c.review).group_by(c.review)
        comments = {row.review: row[1] for row in connection.execute(_of_workspace(query, workspace))}
        news = news_by_review(connection, newest.values(), *reader) if reader else {}
    return [
        ListedPlan(
            *row[:6],
            team.Summary(*row[6:]),
            review := newest.get(row.number),
            *(decided.get(review, ("open", None)) if review else (None, None)),
            comments.get(review, 0),
            news.get(review, News()),
        )
        for row in rows
    ]


def _last_decisions(connection: Connection, workspace: str) -> dict[str, tuple[team.State, Whose | None]]:
    """The state and the standing of decided reviews, by review."""
    c, review, saved = tables.decision.c, tables.review.c, tables.saved_plan.c
    savers = saved.by.label("saved_by"), saved.login.label("saved_login")
    behind = (*savers, review.by.label("asked_by"), review.login.label("asked_login"))
    query = select(c.review, c.verdict, c.by, c.login, *behind).join(tables.review, review.id == c.review)
    last = {row.review: row for row in connection.execute(_of_workspace(query, workspace).order_by(c.number))}
    return {id: (team.state_after(row.verdict), _whose(row)) for id, row in last.items()}


def _whose(row: Row) -> Whose | None:
    if row.verdict == "reopened":
        return None
    behind = Signature(row.saved_by, row.saved_login), Signature(row.asked_by, row.asked_login)
    return whose(row.verdict, behind, Signature(row.by, row.login))


def _of_workspace(query: Select, workspace: str) -> Select:
    """The rows of a query with reviews in it, restricted to plans that are saved in a workspace."""
    saved = tables.saved_plan.c
    return query.join(tables.saved_plan, saved.number == tables.review.c.saved).where(saved.workspace == workspace)


def correct_saved(db: Database, number: int, name: str, note: str, by: str, login: str | None = None) -> None:
    """Give a saved plan another name and note. The old ones stay in the discussion of its reviews, under the name of
    the person who changed them. Raises InputError for anybody but the saver."""
    name, note = team.clean_name(name, "the plan"), team.clean_text(note, "the note", empty=True)
    before = team.find_saved(db, number)
    if not is_saver(before, by, login):
        raise InputError(f"only {before.by}, who saved this plan, may change its name and note")
    changes = [
        f"changed the {what} from “{old}” to “{new}”"
        for what, old, new in (("name", before.name, name), ("note", before.note, note))
        if old != new
    ]
    if not changes:
        return
    reviews = select(tables.review.c.id).where(tables.review.c.saved == number)
    row = {"text": "\n".join(changes)[: team.LONGEST_TEXT], **team.signed(by), "place": None}
    with db.writing() as connection:
        saved = tables.saved_plan
        connection.execute(update(saved).where(saved.c.number == number).values(name=name, note=note))
        for review in connection.scalars(reviews).all():
            connection.execute(insert(tables.comment).values(review=review, **row))


def is_saver(saved: team.SavedPlan, name: str, login: str | None) -> bool:
    """True if a person saved a plan: by their login, or by the typed name if there was none."""
    return saved.login == login if login or saved.login else saved.by == name
