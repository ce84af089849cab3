"""The ledger knows its state directory and how often it was opened; commits keep the time their clients have left."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add all three."""
    op.add_column("identity", sa.Column("directory", sa.String(64), nullable=False, server_default=""))
    op.add_column("identity", sa.Column("openings", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("commits", sa.Column("clients_seconds_left", sa.Double()))


def downgrade() -> None:
    """Remove all three."""
    op.drop_column("commits", "clients_seconds_left")
    op.drop_column("identity", "openings")
    op.drop_column("identity", "directory")
