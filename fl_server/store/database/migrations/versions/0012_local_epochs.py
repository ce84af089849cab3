"""Metrics of clients' local epochs: of each update, and their means over a committed round."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them. Earlier rows have none."""
    for table in ("updates", "commits"):
        op.add_column(table, sa.Column("epochs", sa.Text()))


def downgrade() -> None:
    """Remove them."""
    for table in ("updates", "commits"):
        op.drop_column(table, "epochs")
