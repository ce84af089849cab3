"""Updates keep the norm of each of their payloads, and how far their buffers lie from those that were sent."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; of updates that are there already they are not known."""
    op.add_column("updates", sa.Column("norms", sa.Text()))


def downgrade() -> None:
    """Remove them."""
    op.drop_column("updates", "norms")
