"""Columns for the list of saved plans, as the inputs and figures of a row can be megabytes; logins of those who save,
ask and decide; places of comments; changes of a verdict's thresholds; and persons' last looks at reviews."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    for column, kind in (
        ("cluster", sa.Text),
        ("recording", sa.Text),
        ("seconds", sa.Float),
        ("deployed_seconds", sa.Float),
        ("deployed", sa.Text),
    ):
        op.add_column("saved_plan", sa.Column(column, kind))
    for table in ("saved_plan", "review", "decision"):
        op.add_column(table, sa.Column("login", sa.Text))
    op.add_column("comment", sa.Column("place", sa.String(64)))
    op.create_table(
        "threshold_change",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("review", sa.String(64), sa.ForeignKey("review.id"), nullable=False),
        sa.Column("before", sa.JSON, nullable=False),
        sa.Column("after", sa.JSON, nullable=False),
        sa.Column("by", sa.String(120), nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
    op.create_index("ix_threshold_change_review", "threshold_change", ["review"])
    op.create_table(
        "look",
        sa.Column("who", sa.Text, primary_key=True),
        sa.Column("review", sa.String(64), sa.ForeignKey("review.id"), primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
    )
    _sum_up()


def _sum_up() -> None:
    """Fill the columns of existing plans from their kept data. Their baseline was not simulated then, so they have no gain."""
    saved_plan = sa.table(
        "saved_plan",
        *(sa.column(name, sa.JSON) for name in ("inputs", "figures")),
        *(sa.column(name) for name in ("number", "cluster", "recording", "seconds")),
    )
    connection = op.get_bind()
    for number in connection.scalars(sa.select(saved_plan.c.number)).all():
        own = saved_plan.c.number == number
        row = connection.execute(sa.select(saved_plan.c.inputs, saved_plan.c.figures).where(own)).one()
        inputs = row.inputs or {}
        summary = {
            "cluster": (inputs.get("cluster") or {}).get("name"),
            "recording": (inputs.get("names") or {}).get(inputs.get("workload")),
            "seconds": ((row.figures or {}).get("metrics") or {}).get("total"),
        }
        connection.execute(sa.update(saved_plan).where(own).values(**summary))
