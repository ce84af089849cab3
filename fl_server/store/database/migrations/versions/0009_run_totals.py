"""Sums and best values of a run's rounds, which a start reads in place of all commits."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table. A coordinator fills it at its next start."""
    op.create_table(
        "run_totals",
        sa.Column("run_id", sa.String(64), sa.ForeignKey("runs.run_id"), primary_key=True),
        sa.Column("rounds", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_table("run_totals")
