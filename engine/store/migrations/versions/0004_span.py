"""A column for the span of a saved plan's time: a pass through the MoE layers, or a whole step."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0004", "0003"


def upgrade() -> None:
    op.add_column("saved_plan", sa.Column("span", sa.Text))
