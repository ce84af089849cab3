"""Enrollment tokens, issued certificates, revocations and the audit log."""

import sqlalchemy as sa
from alembic import op

from fl_server.store.database.schema import BigId

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "enrollments",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("prefix", sa.Boolean(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("uses", sa.Integer(), nullable=False),
        sa.Column("uses_left", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("revoked", sa.Boolean(), nullable=False),
    )
    op.create_index("enrollments_by_time", "enrollments", ["created_at", "id"])
    op.create_table(
        "certificates",
        sa.Column("serial", sa.String(64), primary_key=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("issued_at", sa.Double(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("not_after", sa.Double(), nullable=False),
        sa.Column("enrollment_id", sa.String(32), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
    )
    op.create_index("certificates_by_name", "certificates", ["name", "issued_at"])
    op.create_index("certificates_by_time", "certificates", ["issued_at", "serial"])
    op.create_index("certificates_by_key", "certificates", ["key"])
    op.create_index("certificates_by_token", "certificates", ["enrollment_id"])
    op.create_table(
        "revocations",
        sa.Column("kind", sa.String(8), primary_key=True),
        sa.Column("value", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("number", BigId, primary_key=True, autoincrement=False),
        sa.Column("time_us", BigId, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
    )


def downgrade() -> None:
    """Remove the tables."""
    for name in ("audit", "revocations", "certificates", "enrollments"):
        op.drop_table(name)
