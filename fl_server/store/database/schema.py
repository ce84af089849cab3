"""The ledger's tables. Column names are field names of the records in `records`: rows and records turn into each other.

An empty database gets these tables; `migrations` says what a change here needs.
"""

from __future__ import annotations

import json
import math
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)

metadata = MetaData()

BigId = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts up by itself only where the type is INTEGER."""


class JsonText(TypeDecorator[Any]):
    """JSON as text: unlike a database's own JSON type it keeps key order, and the NaN of a diverged run's metrics."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Python value -> text; None -> NULL."""
        del dialect
        return None if value is None else json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Text -> Python value."""
        del dialect
        return None if value is None else json.loads(value)


class SpecText(JsonText):
    """A run's spec. What is no JSON comes back as its text: one bad row keeps no other run from being read."""

    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Text -> Python value, or the text."""
        try:
            return super().process_result_value(value, dialect)
        except (ValueError, RecursionError):
            return value


class Measured(TypeDecorator[float]):
    """A float that may be NaN, kept as NULL: SQLite would do so anyway, and the other backends shall not differ."""

    impl = Double
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        """NaN -> NULL."""
        del dialect
        return None if value is None or math.isnan(value) else value


class Words(TypeDecorator[str]):
    """Text that others sent: PostgreSQL takes no NUL, so U+FFFD stands in its place, on every backend."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """NUL -> U+FFFD."""
        del dialect
        return None if value is None else value.replace("\0", "\ufffd")


def _run_id() -> Column[str]:
    return Column("run_id", String(64), ForeignKey("runs.run_id"), primary_key=True)


def _number(name: str, *, primary: bool = False) -> Column[int]:
    return Column(name, Integer, primary_key=primary, autoincrement=False, nullable=False)


def _text(name: str) -> Column[str]:
    return Column(name, Words, nullable=False)


identity = Table(
    "identity",
    metadata,
    Column("coordinator_id", String(64), primary_key=True),
    Column("directory", String(64), nullable=False),
    _number("epoch"),
    _text("storage"),
)

runs = Table(
    "runs",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("spec", SpecText, nullable=False),
    Column("state", String(16), nullable=False),
    _text("reason"),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("elapsed_s", Double, nullable=False),
    _number("state_epoch"),
    _number("extended_at"),
    Column("bytes_down", BigInteger, nullable=False),
    Column("bytes_up", BigInteger, nullable=False),
    _text("stopping"),
    _text("load_failure"),
)

attempts = Table(
    "attempts",
    metadata,
    _run_id(),
    _number("round", primary=True),
    _number("exchange", primary=True),
    _number("attempt", primary=True),
    Column("cohort", JsonText, nullable=False),
    Column("opened_at", Double, nullable=False),
    Column("seconds_left", Double),
)

charges = Table(
    "charges",
    metadata,
    Column("account", String(256), primary_key=True),
    _number("number", primary=True),
    _text("run_id"),
    _number("round"),
    _number("attempt"),
    Column("noise_multiplier", Double, nullable=False),
    Column("rate", Double, nullable=False),
    Column("charged_at", Double, nullable=False),
    Column("clip", Double, nullable=False),
    Column("fixed_size", Boolean, nullable=False),
)

updates = Table(
    "updates",
    metadata,
    _run_id(),
    _number("round", primary=True),
    _number("exchange", primary=True),
    Column("client_id", String(64), primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("admitted", Boolean, nullable=False),
    _text("reason"),
    _text("detail"),
    Column("num_examples", BigInteger, nullable=False),
    Column("num_steps", BigInteger, nullable=False),
    Column("training_loss", Measured),
    Column("norm", Measured),
    Column("norms", JsonText),
    Column("clip_factor", Double, nullable=False),
    Column("epochs", JsonText),
    _number("attempt"),
    Column("received_at", Double, nullable=False),
    Column("work_s", Double),
    Column("transfer_s", Double),
    Column("epsilon", Double),
    Column("delta", Double),
)

failures = Table(
    "failures",
    metadata,
    _run_id(),
    _number("round", primary=True),
    _number("exchange", primary=True),
    Column("client_id", String(64), primary_key=True),
    _number("failures"),
    _number("restarts"),
    _text("instance_id"),
    _text("cause"),
    _text("detail"),
    Column("failed_at", Double, nullable=False),
    Column("not_finite", Boolean, nullable=False),
)

accepted = Table(
    "accepted",
    metadata,
    _run_id(),
    _number("round", primary=True),
    _number("exchange", primary=True),
    Column("entries", JsonText, nullable=False, comment="[[client id, digest in hex], ...]"),
)

secure_stages = Table(
    "secure_stages",
    metadata,
    _run_id(),
    _number("round", primary=True),
    _number("exchange", primary=True),
    _number("attempt", primary=True),
    Column("stage", String(16), primary_key=True),
    Column("members", JsonText, nullable=False),
    Column("closed", JsonText, nullable=False),
    Column("opened_at", Double, nullable=False),
)

secure_answers = Table(
    "secure_answers",
    metadata,
    _run_id(),
    _number("round", primary=True),
    _number("exchange", primary=True),
    _number("attempt", primary=True),
    Column("stage", String(16), primary_key=True),
    Column("client_id", String(64), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

commits = Table(
    "commits",
    metadata,
    _run_id(),
    _number("round", primary=True),
    Column("committed_at", Double, nullable=False),
    Column("seconds", Double, nullable=False),
    _number("attempts"),
    _number("accepted"),
    _number("dropped"),
    Column("training_loss", Measured),
    Column("bytes_down", BigInteger, nullable=False),
    Column("bytes_up", BigInteger, nullable=False),
    _text("model_digest"),
    Column("metrics", JsonText, nullable=False),
    _number("state_epoch"),
    Column("over_selection", Double, nullable=False),
    Column("clients_seconds_left", Double),
    Column("statistics", Text, nullable=False),
    Column("epochs", JsonText),
    Column("norms", Text, nullable=False),
    Column("averaged_digest", Text),
)

run_totals = Table(
    "run_totals",
    metadata,
    _run_id(),
    _number("rounds"),
    Column("content", Text, nullable=False),
)

client_evaluations = Table(
    "client_evaluations",
    metadata,
    _run_id(),
    _number("round", primary=True),
    Column("client_id", String(64), primary_key=True),
    Column("num_examples", BigInteger, nullable=False),
    Column("metrics", JsonText, nullable=False),
    Column("reported_at", Double, nullable=False),
    Column("sums", JsonText, nullable=False),
)

clients = Table(
    "clients",
    metadata,
    Column("client_id", String(64), primary_key=True),
    Column("registered_at", Double, nullable=False),
    Column("last_seen", Double, nullable=False),
    _text("instance_id"),
    _text("software"),
    Column("labels", JsonText, nullable=False),
    Column("device", JsonText, nullable=False),
    Column("tasks", JsonText, nullable=False),
    Column("methods", JsonText, nullable=False),
    Column("present", Boolean, nullable=False),
    Column("banned", Boolean, nullable=False),
    Column("draining", Boolean, nullable=False),
    _text("note"),
    _number("updates_counted"),
    Column("work", JsonText, nullable=False),
    Column("enrolled", JsonText),
    Column("certificate", JsonText),
    Column("releases", Boolean, nullable=False),
    Column("packages", JsonText, nullable=False),
)

quarantines = Table(
    "quarantines",
    metadata,
    Column("client_id", String(64), primary_key=True),
    _number("refusals"),
    Column("until", Double, nullable=False),
    _text("reason"),
    _number("failures"),
    _number("deadlines"),
)

client_states = Table(
    "client_states",
    metadata,
    _run_id(),
    Column("client_id", String(64), primary_key=True),
    _number("losses"),
    _number("lost_epoch"),
    _number("lost_round"),
    _number("warned_round"),
    _text("reason"),
)

history = Table(
    "history",
    metadata,
    Column("id", BigId, primary_key=True),
    Column("time", Double, nullable=False),
    _text("actor"),
    _text("event"),
    _text("subject"),
    _text("detail"),
    Index("history_by_subject", "subject", "id"),
)
