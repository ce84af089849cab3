"""Released models and packages in the ledger: each version with what was signed, and what became of it on devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Double,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    RowMapping,
    String,
    Table,
    delete,
    insert,
    select,
)
from sqlalchemy import update as change

from fl_server.rounds.releases import Device, DeviceState, Kind, Release, Rules
from fl_server.store.database.schema import JsonText, Words, metadata
from fl_server.store.database.transactions import Transactions, write_history
from fl_server.store.records import HistoryRecord

releases = Table(
    "releases",
    metadata,
    Column("kind", String(8), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("run_id", String(64), nullable=False),
    Column("owner", Words, nullable=False),
    Column("description", LargeBinary, nullable=False),
    Column("signature", LargeBinary, nullable=False),
    Column("signer", String(80), nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("rules", JsonText, nullable=False),
    Column("share", Double, nullable=False),
    Column("stage_began", Double, nullable=False),
    Column("rolled_back", Boolean, nullable=False),
    Column("reason", Words, nullable=False),
)
"""A run may be deleted while its releases stay, so run_id refers to nothing."""

release_devices = Table(
    "release_devices",
    metadata,
    Column("kind", String(8), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("client_id", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("detail", Words, nullable=False),
    Column("examples", Integer, nullable=False),
    Column("metrics", JsonText, nullable=False),
    Column("before", JsonText, nullable=False),
    Column("reported_at", Double),
    ForeignKeyConstraint(["kind", "name", "version"], ["releases.kind", "releases.name", "releases.version"]),
)
_CHANGING = ("share", "stage_began", "rolled_back", "reason")
_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """One version of a released model or package, without its devices."""

    kind: Kind
    name: str
    version: int
    run_id: str
    """Empty for a package."""
    owner: str
    """The operator that the run belonged to; empty for nobody."""
    description: bytes
    """What was signed: `fl_common.released.Description`, or the manifest of a package."""
    signature: bytes
    signer: str
    digest: bytes
    """BLAKE3-256 of its bytes."""
    created_at: float
    rules: Mapping[str, Any]
    """The fields of `Rules`."""
    share: float = 0.0
    stage_began: float = 0.0
    rolled_back: bool = False
    reason: str = ""

    def release(self, devices: Mapping[str, Device]) -> Release:
        """The release as the core knows it."""
        rules = Rules(**{**self.rules, "stages": tuple(self.rules["stages"])})
        return Release(self.name, self.version, rules, self.share, self.stage_began, self.rolled_back, self.reason,
                       devices, self.kind)  # fmt: skip


class ReleaseLedger(Transactions):
    """The part of the `Store` for releases."""

    def add_release(self, record: ReleaseRecord, why: HistoryRecord) -> None:
        """Add a release, which has no devices yet. Raises StoreError if there is this version."""
        with self._transaction(f"add release {record.version} of {record.name!r}", fsynced=True) as db:
            db.execute(insert(releases), {field.name: getattr(record, field.name) for field in fields(record)})
            write_history(db, why)

    def save_release(self, release: Release, clients: Iterable[str], whys: Iterable[HistoryRecord]) -> None:
        """Write a release, those of its devices that have changed, and the history, in one transaction."""
        key = {"kind": release.kind, "name": release.name, "version": release.version}
        rows = [_device_row(key, client, release.devices[client]) for client in clients if client in release.devices]
        doing, why = f"write release {release.version} of {release.name!r}", list(whys)
        with self._transaction(doing, fsynced=bool(why)) as db:
            values = {name: getattr(release, name) for name in _CHANGING}
            db.execute(change(releases).filter_by(**key).values(values))
            for first in range(0, len(rows), _AT_ONCE):
                some = rows[first : first + _AT_ONCE]
                named = release_devices.c.client_id.in_([row["client_id"] for row in some])
                db.execute(delete(release_devices).filter_by(**key).where(named))
                db.execute(insert(release_devices), some)
            write_history(db, *why)

    def releases(self, kind: Kind) -> list[ReleaseRecord]:
        """All releases of a kind, the oldest first."""
        query = select(releases).filter_by(kind=kind)
        query = query.order_by(releases.c.created_at, releases.c.name, releases.c.version)
        return [ReleaseRecord(**{**row, "kind": kind}) for row in self._read("releases", query)]

    def release_devices(
        self, kind: Kind, name: str, version: int, after: str = "", limit: int = 1 << 30
    ) -> dict[str, Device]:
        """At most `limit` devices of a release, in the order of id bytes, after a client."""
        client_id = release_devices.c.client_id.collate(self._byte_order)
        query = select(release_devices).filter_by(kind=kind, name=name, version=version).where(client_id > after)
        rows = self._read("the devices of a release", query.order_by(client_id).limit(limit))
        return {row["client_id"]: _device(row) for row in rows}


def _device_row(key: Mapping[str, Any], client: str, device: Device) -> dict[str, Any]:
    values = {field.name: getattr(device, field.name) for field in fields(device)}
    plain = {"state": device.state.value, "metrics": dict(device.metrics), "before": dict(device.before)}
    return {**key, "client_id": client, **values, **plain}


def _device(row: RowMapping) -> Device:
    values = {field.name: row[field.name] for field in fields(Device)}
    return Device(**{**values, "state": DeviceState(row["state"])})
