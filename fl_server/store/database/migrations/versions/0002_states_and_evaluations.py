"""Commits name the epoch of the client states; clients' evaluations have a table."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both."""
    epoch = sa.Column("state_epoch", sa.Integer(), autoincrement=False, nullable=False, server_default="0")
    op.add_column("commits", epoch)
    op.create_table(
        "client_evaluations",
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("client_id", sa.String(64), nullable=False),
        sa.Column("num_examples", sa.BigInteger(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
        sa.PrimaryKeyConstraint("run_id", "round", "client_id"),
    )


def downgrade() -> None:
    """Remove both."""
    op.drop_table("client_evaluations")
    op.drop_column("commits", "state_epoch")
