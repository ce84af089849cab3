"""What stands against clients: updates refused in a row, and until when that keeps them from being drawn."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "standings",
        sa.Column("client_id", sa.String(64), primary_key=True),
        sa.Column("refusals", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_table("standings")
