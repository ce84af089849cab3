"""Bytes of a run since it was created, also of rounds that were not committed."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    for name in ("bytes_down", "bytes_up"):
        op.add_column("runs", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Remove them."""
    for name in ("bytes_down", "bytes_up"):
        op.drop_column("runs", name)
