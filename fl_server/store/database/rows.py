"""Converts records to table rows and back. Column names are field names; the few values that differ are here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import RowMapping

from fl_server.store.certificates import CertificateRecord, EnrollmentRecord, RevocationRecord
from fl_server.store.records import (
    AttemptRecord,
    ClientEvaluation,
    ClientRecord,
    ClientStateRecord,
    CommitRecord,
    FailureRecord,
    HistoryRecord,
    QuarantineRecord,
    RunRecord,
    TotalsRecord,
    UpdateRecord,
)

Record = (
    RunRecord | AttemptRecord | UpdateRecord | FailureRecord | CommitRecord | TotalsRecord | ClientEvaluation
    | ClientRecord | QuarantineRecord | ClientStateRecord | HistoryRecord | EnrollmentRecord | CertificateRecord
    | RevocationRecord
)  # fmt: skip
Row = RowMapping


def to_row(record: Record) -> dict[str, Any]:
    """Field values by name, with mappings and tuples as the dicts and lists that JSON knows."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(each) for each in value]
    return value


def run(row: Row) -> RunRecord:
    """Row of `runs` -> record."""
    return RunRecord(**row)


def attempt(row: Row) -> AttemptRecord:
    """Row of `attempts` -> record."""
    return AttemptRecord(**{**row, "cohort": tuple(row["cohort"])})


def update(row: Row) -> UpdateRecord:
    """Row of `updates` -> record. A norm that was NaN is NULL in the table; so is a loss, which is then None."""
    norm = math.nan if row["norm"] is None else row["norm"]
    return UpdateRecord(**{**row, "norm": norm, "epochs": tuple(row["epochs"] or ())})


def failure(row: Row) -> FailureRecord:
    """Row of `failures` -> record."""
    return FailureRecord(**row)


def commit(row: Row) -> CommitRecord:
    """Row of `commits` -> record."""
    return CommitRecord.of(dict(row))


def totals(row: Row) -> TotalsRecord:
    """Row of `run_totals` -> record."""
    return TotalsRecord(**row)


def evaluation(row: Row) -> ClientEvaluation:
    """Row of `client_evaluations` -> record."""
    return ClientEvaluation(**row)


def client(row: Row) -> ClientRecord:
    """Row of `clients` -> record."""
    return ClientRecord(**{**row, "tasks": tuple(row["tasks"]), "methods": tuple(row["methods"])})


def quarantine(row: Row) -> QuarantineRecord:
    """Row of `quarantines` -> record."""
    return QuarantineRecord(**row)


def client_state(row: Row) -> ClientStateRecord:
    """Row of `client_states` -> record."""
    return ClientStateRecord(**row)


def history(row: Row) -> HistoryRecord:
    """Row of `history` -> record."""
    return HistoryRecord(**{key: value for key, value in row.items() if key != "id"})
