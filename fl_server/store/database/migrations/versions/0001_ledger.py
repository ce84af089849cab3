"""The first ledger: identity, runs, attempts, updates, accepted lists, commits, clients, history."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make all tables."""
    _coordinator()
    _rounds()
    _updates()
    _clients()


def downgrade() -> None:
    """Remove all tables, those that refer to others first."""
    for table in (
        "history",
        "clients",
        "commits",
        "accepted",
        "updates",
        "attempts",
        "runs",
        "identity",
    ):
        op.drop_table(table)


def _key(*names: str) -> list[Any]:
    """Whole-number columns of a primary key below a run, with that key."""
    return [
        sa.Column("run_id", sa.String(64), nullable=False),
        *(sa.Column(name, sa.Integer(), autoincrement=False, nullable=False) for name in names),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
    ]


def _column(name: str, kind: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, autoincrement=False, nullable=False)


def _coordinator() -> None:
    op.create_table(
        "identity",
        _column("coordinator_id", sa.String(64)),
        sa.PrimaryKeyConstraint("coordinator_id"),
    )
    op.create_table(
        "runs",
        _column("run_id", sa.String(64)),
        _column("spec", sa.Text()),
        _column("state", sa.String(16)),
        _column("reason", sa.Text()),
        _column("created_at", sa.Double()),
        sa.Column("ended_at", sa.Double()),
        _column("elapsed_s", sa.Double()),
        _column("state_epoch", sa.Integer()),
        _column("extended_at", sa.Integer()),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_table(
        "history",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        _column("time", sa.Double()),
        _column("actor", sa.Text()),
        _column("event", sa.Text()),
        _column("subject", sa.Text()),
        _column("detail", sa.Text()),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("history_by_subject", "history", ["subject", "id"])


def _rounds() -> None:
    op.create_table(
        "attempts",
        *_key("round", "exchange", "attempt"),
        _column("cohort", sa.Text()),
        _column("opened_at", sa.Double()),
        sa.PrimaryKeyConstraint("run_id", "round", "exchange", "attempt"),
    )
    op.create_table(
        "accepted",
        *_key("round", "exchange"),
        sa.Column(
            "entries",
            sa.Text(),
            nullable=False,
            comment="[[client id, digest in hex], ...]",
        ),
        sa.PrimaryKeyConstraint("run_id", "round", "exchange"),
    )
    op.create_table(
        "commits",
        *_key("round"),
        _column("committed_at", sa.Double()),
        _column("seconds", sa.Double()),
        _column("attempts", sa.Integer()),
        _column("accepted", sa.Integer()),
        _column("dropped", sa.Integer()),
        sa.Column("training_loss", sa.Double()),
        _column("bytes_down", sa.BigInteger()),
        _column("bytes_up", sa.BigInteger()),
        _column("model_digest", sa.Text()),
        sa.Column("averaged_digest", sa.Text()),
        _column("metrics", sa.Text()),
        sa.PrimaryKeyConstraint("run_id", "round"),
    )


def _updates() -> None:
    op.create_table(
        "updates",
        *_key("round", "exchange"),
        _column("client_id", sa.String(64)),
        _column("digest", sa.LargeBinary()),
        _column("size_bytes", sa.BigInteger()),
        _column("admitted", sa.Boolean()),
        _column("reason", sa.Text()),
        _column("detail", sa.Text()),
        _column("num_examples", sa.BigInteger()),
        _column("num_steps", sa.BigInteger()),
        sa.Column("training_loss", sa.Double()),
        sa.Column("norm", sa.Double()),
        _column("clip_factor", sa.Double()),
        _column("attempt", sa.Integer()),
        _column("received_at", sa.Double()),
        sa.PrimaryKeyConstraint("run_id", "round", "exchange", "client_id"),
    )


def _clients() -> None:
    op.create_table(
        "clients",
        _column("client_id", sa.String(64)),
        _column("registered_at", sa.Double()),
        _column("last_seen", sa.Double()),
        _column("instance_id", sa.Text()),
        _column("software", sa.Text()),
        _column("labels", sa.Text()),
        _column("device", sa.Text()),
        _column("tasks", sa.Text()),
        _column("present", sa.Boolean()),
        _column("banned", sa.Boolean()),
        _column("draining", sa.Boolean()),
        _column("note", sa.Text()),
        _column("updates_counted", sa.Integer()),
        _column("updates_refused", sa.Integer()),
        sa.PrimaryKeyConstraint("client_id"),
    )
