"""Methods from outside that clients have."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them."""
    op.add_column("clients", sa.Column("methods", sa.Text(), nullable=False, server_default="[]"))


def downgrade() -> None:
    """Remove them."""
    op.drop_column("clients", "methods")
