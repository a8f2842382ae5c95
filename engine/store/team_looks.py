"""What is new to a person: comments, decisions and thresholds of others since they last looked at a review."""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, Table, and_, case, func, select
from sqlalchemy.dialects import postgresql, sqlite

from engine.store import tables
from engine.store.database import Database
from engine.store.team import Comment, Decision, Review, ThresholdChange


@dataclass(frozen=True)
class News:
    """How many of each; unseen: nobody of this name has looked at the review yet, so that it is new as a whole."""

    comments: int = 0
    decisions: int = 0
    thresholds: int = 0
    unseen: bool = False

    def __bool__(self) -> bool:
        return self.unseen or bool(self.comments or self.decisions or self.thresholds)


def last_look(db: Database, who: str, review: str) -> float | None:
    """When a person last looked at a review, in seconds since the epoch; None: never."""
    c = tables.look.c
    with db.reading() as connection:
        return connection.scalar(select(c.at).where(c.who == who, c.review == review))


def note_look(db: Database, who: str, review: str, at: float) -> None:
    """A person has seen all of a review that was there at a moment."""
    with db.writing() as connection:
        dialect = {"sqlite": sqlite, "postgresql": postgresql}[connection.dialect.name]
        row = dialect.insert(tables.look).values(who=who, review=review, at=at)
        connection.execute(row.on_conflict_do_update(index_elements=["who", "review"], set_={"at": at}))


def news_of(review: Review, name: str, since: float | None) -> News:
    """What others than `name` have added to a review since a look; None: never looked."""
    if since is None:
        return News(unseen=review.by != name)
    kinds = (Comment, Decision, ThresholdChange)
    entries = (*review.comments, *review.decisions, *review.thresholds)
    return News(*(sum(_is_new(entry, name, since) for entry in entries if isinstance(entry, kind)) for kind in kinds))


def _is_new(entry: Comment | Decision | ThresholdChange, name: str, since: float) -> bool:
    return entry.at > since and entry.by != name


def newest(review: Review) -> float:
    """When something was last added to a review, in seconds since the epoch."""
    return max(entry.at for entry in (review, *review.comments, *review.decisions, *review.thresholds))


def news_by_review(connection: Connection, reviews: Iterable[str], who: str, name: str) -> dict[str, News]:
    """What is new to a person, of those of these reviews where something is. who: what looks are kept under; name: what the
    person writes under."""
    wanted = list(reviews)
    c = tables.review.c
    look = and_(tables.look.c.review == c.id, tables.look.c.who == who)
    looks = select(c.id, c.by, tables.look.c.at).outerjoin(tables.look, look).where(c.id.in_(wanted))
    counts = [
        _new(connection, table, who, name) for table in (tables.comment, tables.decision, tables.threshold_change)
    ]
    news = {}
    for row in connection.execute(looks):
        news[row.id] = (
            News(unseen=row.by != name) if row.at is None else News(*(count.get(row.id, 0) for count in counts))
        )
    return {id: new for id, new in news.items() if new}


def _new(connection: Connection, table: Table, who: str, name: str) -> dict[str, int]:
    """How many rows of a table others have added since a person's look, by review."""
    seen = and_(tables.look.c.review == table.c.review, tables.look.c.who == who)
    query = (
        select(table.c.review, func.sum(case((table.c.by != name, 1), else_=0)))
        .join(tables.look, seen)
        .where(table.c.at > tables.look.c.at)
        .group_by(table.c.review)
    )
    return {row[0]: int(row[1]) for row in connection.execute(query)}
