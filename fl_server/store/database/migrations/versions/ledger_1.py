"""The first version of the ledger: `schema.py` itself, which makes the tables of an empty database."""

revision = "ledger_1_staged"
down_revision = None


def upgrade() -> None:
    """Change nothing: no older ledger exists."""
