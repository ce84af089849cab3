"""Failures of runs and work, missed deadlines, norms after rounds, sums of metrics, renewals, labels of enrollment."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them. The norms are empty in rounds of older versions."""
    op.add_column("runs", sa.Column("load_failure", sa.Text(), nullable=False, server_default=""))
    op.add_column("commits", sa.Column("norms", sa.Text(), nullable=False, server_default=""))
    op.add_column("standings", sa.Column("deadlines", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("client_evaluations", sa.Column("sums", sa.Text(), nullable=False, server_default="[]"))
    op.create_table(
        "failures",
        sa.Column("run_id", sa.String(64), sa.ForeignKey("runs.run_id"), primary_key=True),
        sa.Column("round", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("exchange", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("client_id", sa.String(64), primary_key=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("failed_at", sa.Double(), nullable=False),
    )
    op.add_column("certificates", sa.Column("renewed_from", sa.String(64), nullable=False, server_default=""))
    op.add_column("certificates", sa.Column("labels", sa.Text(), nullable=False, server_default="{}"))
    op.create_index("certificates_by_parent", "certificates", ["renewed_from"])
    op.add_column("clients", sa.Column("enrolled", sa.Text()))


def downgrade() -> None:
    """Remove them."""
    op.drop_column("clients", "enrolled")
    op.drop_index("certificates_by_parent", "certificates")
    op.drop_column("certificates", "labels")
    op.drop_column("certificates", "renewed_from")
    op.drop_table("failures")
    op.drop_column("client_evaluations", "sums")
    op.drop_column("standings", "deadlines")
    op.drop_column("commits", "norms")
    op.drop_column("runs", "load_failure")
