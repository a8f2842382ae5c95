"""A column for the gain of a saved plan that every page shows, held out where something was."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    op.add_column("saved_plan", sa.Column("headline", sa.Float))
