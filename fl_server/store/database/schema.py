"""The ledger's tables. Most are made from the records in `records`: rows and records turn into each other.

A new field of such a record is a new column. An empty database gets these tables; `migrations` says what a change of
one needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from fl_server.store import records

metadata = sa.MetaData()

BigId = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""SQLite counts up by itself only where the type is INTEGER."""


class JsonText(sa.TypeDecorator[Any]):
    """JSON as text: unlike a database's own JSON type it keeps key order, and the NaN of a diverged run's metrics."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        """Python value -> text; None -> NULL."""
        del dialect
        return None if value is None else json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Text -> Python value."""
        del dialect
        return None if value is None else json.loads(value)


class SpecText(JsonText):
    """A run's spec. What is no JSON comes back as its text: one bad row keeps no other run from being read."""

    cache_ok = True

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Text -> Python value, or the text."""
        try:
            return super().process_result_value(value, dialect)
        except (ValueError, RecursionError):
            return value


class Measured(sa.TypeDecorator[float]):
    """A float that may be NaN, kept as NULL: SQLite would do so anyway, and the other backends shall not differ."""

    impl = sa.Double
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: sa.Dialect) -> float | None:
        """NaN -> NULL."""
        del dialect
        return None if value is None or math.isnan(value) else value


class Words(sa.TypeDecorator[str]):
    """Text that others sent: PostgreSQL takes no NUL, so U+FFFD stands in its place, on every backend."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """NUL -> U+FFFD."""
        del dialect
        return None if value is None else value.replace("\0", "\ufffd")


_TYPES = {str: Words, int: sa.Integer, float: sa.Double, bool: sa.Boolean, bytes: sa.LargeBinary}
"""The column of a field of this type. Other fields are JSON."""
_Type = type[TypeEngine[Any]] | TypeEngine[Any]
_IDS = {"run_id": sa.String(64), "client_id": sa.String(64), "stage": sa.String(16)}
"""Columns of keys."""


def columns_of(
    record: type[Any], key: Collection[str] = (), nullable: Collection[str] = (), /, **types: _Type
) -> list[sa.Column[Any]]:
    """A column for each field of a record, in their order.

    Args:
        record: a dataclass.
        key: fields of the primary key.
        nullable: fields whose columns may be NULL although they are never None themselves.
        types: of columns for which the types of their fields are not enough.
    """
    columns: list[sa.Column[Any]] = []
    for field, hint in get_type_hints(record).items():
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        kind = types.get(field) or (_IDS.get(field) if field in key else None) or _TYPES.get(kinds[0], JsonText)
        may_be_null = NoneType in kinds or kind is Measured or field in nullable
        columns.append(sa.Column(field, kind, primary_key=field in key, autoincrement=False, nullable=may_be_null))
    return columns


def record_table(
    name: str,
    record: type[Any],
    key: Collection[str],
    nullable: Collection[str] = (),
    /,
    *others: SchemaItem,
    **types: _Type,
) -> sa.Table:
    """A table of records; the arguments are those of `columns_of`. A `run_id` in its key refers to a run."""
    run = [sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"])] if "run_id" in key and name != "runs" else []
    return sa.Table(name, metadata, *columns_of(record, key, nullable, **types), *run, *others)


_ATTEMPT = ("run_id", "round", "exchange", "attempt")
_WORK = ("run_id", "round", "exchange", "client_id")
_ROUND = ("run_id", "round")

identity = sa.Table(
    "identity",
    metadata,
    sa.Column("coordinator_id", sa.String(64), primary_key=True),
    sa.Column("directory", sa.String(64), nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("storage", Words, nullable=False),
)
runs = record_table(
    "runs",
    records.RunRecord,
    ("run_id",),
    spec=SpecText,
    state=sa.String(16),
    bytes_down=sa.BigInteger,
    bytes_up=sa.BigInteger,
)
attempts = record_table("attempts", records.AttemptRecord, _ATTEMPT)
charges = record_table("charges", records.ChargeRecord, ("account", "number"), account=sa.String(256))
updates = record_table(
    "updates", records.UpdateRecord, _WORK, ("epochs",), size_bytes=sa.BigInteger, num_examples=sa.BigInteger,
    num_steps=sa.BigInteger, training_loss=Measured, norm=Measured,
)  # fmt: skip
failures = record_table("failures", records.FailureRecord, _WORK)
accepted = sa.Table(
    "accepted",
    metadata,
    sa.Column("run_id", sa.String(64), sa.ForeignKey("runs.run_id"), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("exchange", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("entries", JsonText, nullable=False, comment="[[client id, digest in hex], ...]"),
)
secure_stages = record_table("secure_stages", records.StageRecord, (*_ATTEMPT, "stage"))
secure_answers = record_table("secure_answers", records.AnswerRecord, (*_ATTEMPT, "stage", "client_id"))
commits = record_table(
    "commits", records.CommitRecord, _ROUND, ("epochs",), training_loss=Measured, bytes_down=sa.BigInteger,
    bytes_up=sa.BigInteger, statistics=sa.Text, norms=sa.Text, averaged_digest=sa.Text,
)  # fmt: skip
run_totals = record_table("run_totals", records.TotalsRecord, ("run_id",), content=sa.Text)
client_evaluations = record_table(
    "client_evaluations", records.ClientEvaluation, (*_ROUND, "client_id"), num_examples=sa.BigInteger
)
clients = record_table("clients", records.ClientRecord, ("client_id",))
quarantines = record_table("quarantines", records.QuarantineRecord, ("client_id",))
client_states = record_table("client_states", records.ClientStateRecord, ("run_id", "client_id"))
history = sa.Table(
    "history",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    *columns_of(records.HistoryRecord),
    sa.Index("history_by_subject", "subject", "id"),
)
