"""The tables of the team's database. Rows of plans, comments and decisions are only ever added, so that two people who
write at once lose nothing; every fact is in one place only (a review's state is its last decision)."""

from sqlalchemy import JSON, CheckConstraint, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

NAME, ID = 120, 64
"""Longest names and ids."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)


def _reference(name: str, table: str, index: bool = False) -> Column:
    return Column(name, String(ID), ForeignKey(f"{table}.id"), nullable=False, index=index)


def _made() -> tuple[Column, Column]:
    """The maker of a row, and its time: seconds since the epoch."""
    return Column("by", String(NAME), nullable=False), Column("at", Float, nullable=False)


def _login() -> Column:
    """The maker's id at the login; none if nobody was logged in."""
    return Column("login", Text)


workspace = Table(
    "workspace", metadata, Column("id", String(ID), primary_key=True), Column("name", String(NAME), nullable=False), *_made()
)

plan = Table(
    "plan",
    metadata,
    Column("id", String(ID), primary_key=True),
    Column("body", Text, nullable=False),
    Column("parent", String(ID), index=True),
)
"""id: the plan's own, of its content
body: its JSON
parent: the plan that it was derived from, saved or not"""

saved_plan = Table(
    "saved_plan",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    _reference("workspace", "workspace"),
    _reference("plan", "plan"),
    Column("name", String(NAME), nullable=False),
    Column("note", Text, nullable=False),
    Column("inputs", JSON, nullable=False),
    Column("figures", JSON, nullable=False),
    *_made(),
    _login(),
    Column("cluster", Text),
    Column("recording", Text),
    Column("seconds", Float),
    Column("deployed_seconds", Float),
    Column("deployed", Text),
    Column("headline", Float),
    Column("span", Text),
    Index("uq_saved_plan_workspace_plan", "workspace", "plan", unique=True),
)
"""inputs: digest of every input by role, with its name
figures: those of the simulation when it was saved
the last seven: `team.Summary`"""

review = Table(
    "review",
    metadata,
    Column("id", String(ID), primary_key=True),
    Column("saved", Integer, ForeignKey("saved_plan.number"), nullable=False, index=True),
    Column("question", Text, nullable=False),
    *_made(),
    _login(),
)

comment = Table(
    "comment",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    _reference("review", "review", index=True),
    Column("text", Text, nullable=False),
    *_made(),
    Column("place", String(ID)),
)
"""place: a `team_approval.Place`, to which it points"""

decision = Table(
    "decision",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    _reference("review", "review", index=True),
    Column("verdict", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    *_made(),
    _login(),
    CheckConstraint("verdict in ('approved', 'rejected', 'reopened')", name="verdict"),
)

threshold_change = Table(
    "threshold_change",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    _reference("review", "review", index=True),
    Column("before", JSON, nullable=False),
    Column("after", JSON, nullable=False),
    *_made(),
)
"""before, after: thresholds of the verdict on the plan of a review, by name."""

look = Table(
    "look",
    metadata,
    Column("who", Text, primary_key=True),
    Column("review", String(ID), ForeignKey("review.id"), primary_key=True),
    Column("at", Float, nullable=False),
)
"""The only rows that change.

who: a person's id at the login, else the name that they typed
at: seconds since the epoch of their last look at the review
"""

run = Table(
    "run",
    metadata,
    Column("id", String(ID), primary_key=True),
    _reference("plan", "plan", index=True),
    Column("place", String(NAME), nullable=False),
    Column("predicted", Float),
    Column("measured", Float),
    Column("report", JSON, nullable=False),
    *_made(),
)
"""id: the launch job's; predicted, measured: seconds."""
