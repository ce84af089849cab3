"""What is known of clients' states in a run (losses, warnings), and failures of work in a row."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    op.add_column(
        "standings", sa.Column("failures", sa.Integer(), autoincrement=False, nullable=False, server_default="0")
    )
    op.create_table(
        "state_standings",
        sa.Column("run_id", sa.String(64), sa.ForeignKey("runs.run_id"), primary_key=True),
        sa.Column("client_id", sa.String(64), primary_key=True),
        sa.Column("losses", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("lost_epoch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("lost_round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("warned_round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )


def downgrade() -> None:
    """Remove them."""
    op.drop_table("state_standings")
    op.drop_column("standings", "failures")
