"""Attempts keep the time that they have left; commits the over-selection that was learned up to them."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both."""
    op.add_column("attempts", sa.Column("seconds_left", sa.Double()))
    op.add_column("commits", sa.Column("over_selection", sa.Double(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Remove both."""
    op.drop_column("commits", "over_selection")
    op.drop_column("attempts", "seconds_left")
