"""Tables of enrollment tokens, certificates, revocations and the audit log."""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Double, Index, Integer, LargeBinary, String, Table

from fl_server.store.database.schema import BigId, JsonText, Words, metadata

enrollments = Table(
    "enrollments",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("name", String(64), nullable=False),
    Column("prefix", Boolean, nullable=False),
    Column("labels", JsonText, nullable=False),
    Column("uses", Integer, nullable=False),
    Column("uses_left", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("actor", Words, nullable=False),
    Column("revoked", Boolean, nullable=False),
    Index("enrollments_by_time", "created_at", "id"),
)

certificates = Table(
    "certificates",
    metadata,
    Column("serial", String(64), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("name", String(64), nullable=False),
    Column("key", String(64), nullable=False),
    Column("issued_at", Double, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("not_after", Double, nullable=False),
    Column("enrollment_id", String(32), nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("renewed_from", String(64), nullable=False),
    Column("labels", JsonText, nullable=False),
    Index("certificates_by_name", "name", "issued_at"),
    Index("certificates_by_time", "issued_at", "serial"),
    Index("certificates_by_key", "key"),
    Index("certificates_by_token", "enrollment_id"),
    Index("certificates_by_parent", "renewed_from"),
)

revocations = Table(
    "revocations",
    metadata,
    Column("kind", String(8), primary_key=True),
    Column("value", String(64), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("revoked_at", Double, nullable=False),
    Column("actor", Words, nullable=False),
    Column("reason", Words, nullable=False),
)
"""kind: "serial" or "key" with a value in hex, or "name": `certificates.RevocationRecord` has the meaning of each."""

audit = Table(
    "audit",
    metadata,
    Column("number", BigId, primary_key=True, autoincrement=False),
    Column("time_us", BigId, nullable=False),
    Column("actor", Words, nullable=False),
    Column("address", Words, nullable=False),
    Column("method", Words, nullable=False),
    Column("subject", Words, nullable=False),
    Column("result", Words, nullable=False),
    Column("detail", Words, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)
"""Rows are only added. `hash` is SHA-256 over the previous row's hash and this row's other columns."""
