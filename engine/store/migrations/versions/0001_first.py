"""The first tables: workspaces, plans, reviews, comments, decisions, runs.

Written out, not taken from `engine.store.tables`: those will change, the tables of a database of this version will not.
"""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None


def upgrade() -> None:
    def by_and_at() -> tuple[sa.Column, sa.Column]:
        return sa.Column("by", sa.String(120), nullable=False), sa.Column("at", sa.Float, nullable=False)

    def key(table: str) -> sa.Column:
        return sa.Column(table, sa.String(64), sa.ForeignKey(f"{table}.id"), nullable=False)

    def numbered() -> sa.Column:
        return sa.Column("number", sa.Integer, primary_key=True, autoincrement=True)

    def named() -> sa.Column:
        return sa.Column("id", sa.String(64), primary_key=True)

    op.create_table("workspace", named(), sa.Column("name", sa.String(120), nullable=False), *by_and_at())
    op.create_table("plan", named(), sa.Column("body", sa.Text, nullable=False), sa.Column("parent", sa.String(64)))
    op.create_index("ix_plan_parent", "plan", ["parent"])
    op.create_table(
        "saved_plan",
        numbered(),
        key("workspace"),
        key("plan"),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("inputs", sa.JSON, nullable=False),
        sa.Column("figures", sa.JSON, nullable=False),
        *by_and_at(),
    )
    op.create_index("uq_saved_plan_workspace_plan", "saved_plan", ["workspace", "plan"], unique=True)
    op.create_table(
        "review",
        named(),
        sa.Column("saved", sa.Integer, sa.ForeignKey("saved_plan.number"), nullable=False),
        sa.Column("question", sa.Text, nullable=False),
        *by_and_at(),
    )
    op.create_index("ix_review_saved", "review", ["saved"])
    op.create_table("comment", numbered(), key("review"), sa.Column("text", sa.Text, nullable=False), *by_and_at())
    op.create_index("ix_comment_review", "comment", ["review"])
    op.create_table(
        "decision",
        numbered(),
        key("review"),
        sa.Column("verdict", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        *by_and_at(),
        sa.CheckConstraint("verdict in ('approved', 'rejected', 'reopened')", name="ck_decision_verdict"),
    )
    op.create_index("ix_decision_review", "decision", ["review"])
    op.create_table(
        "run",
        named(),
        key("plan"),
        sa.Column("place", sa.String(120), nullable=False),
        sa.Column("predicted", sa.Float),
        sa.Column("measured", sa.Float),
        sa.Column("report", sa.JSON, nullable=False),
        *by_and_at(),
    )
    op.create_index("ix_run_plan", "run", ["plan"])
