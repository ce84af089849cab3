"""Clients in the ledger: the roster, quarantine records and client states, and what became of releases on devices.

A release is a version of a model or a package, with what was signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from fl_server.rounds.releases import Device, DeviceState, Kind, Release, Rules
from fl_server.store.client_work import ClientWork
from fl_server.store.database import schema
from fl_server.store.database import transactions as sql
from fl_server.store.database.schema import columns_of, record_table
from fl_server.store.database.transactions import Transactions
from fl_server.store.records import ClientRecord, ClientStateRecord, HistoryRecord, QuarantineRecord, only_banned

_CHANGING = ("share", "stage_began", "rolled_back", "reason")
_AT_ONCE = 500
_NO_UPDATES: dict[str, object] = {"updates_counted": 0, "work": {}}
_KNOWN = sa.select(schema.clients.c.client_id).where(
    schema.clients.c.client_id.in_(sa.bindparam("ids", expanding=True))
)
_AGAIN = sa.update(schema.clients).where(schema.clients.c.client_id == sa.bindparam("id_of_row"))


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


releases = record_table(
    "releases", ReleaseRecord, ("kind", "name", "version"), kind=sa.String(8), name=sa.String(64), run_id=sa.String(64),
    signer=sa.String(80),
)  # fmt: skip
"""A run may be deleted while its releases stay, so run_id refers to nothing."""
release_devices = sa.Table(
    "release_devices",
    schema.metadata,
    sa.Column("kind", sa.String(8), primary_key=True),
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("client_id", sa.String(64), primary_key=True),
    *columns_of(Device, state=sa.String(16)),
    sa.ForeignKeyConstraint(["kind", "name", "version"], ["releases.kind", "releases.name", "releases.version"]),
)


class ReleaseLedger(Transactions):
    """The part of the `Store` for releases."""

    def add_release(self, record: ReleaseRecord, why: HistoryRecord) -> None:
        """Add a release, which has no devices yet. Raises StoreError if there is this version."""
        with self._transaction(f"add release {record.version} of {record.name!r}", fsynced=True) as db:
            db.execute(sa.insert(releases), sql.to_row(record))
            sql.write_history(db, why)

    def save_release(self, release: Release, clients: Iterable[str], whys: Iterable[HistoryRecord]) -> None:
        """Write a release, those of its devices that have changed, and the history, in one transaction."""
        key = {"kind": release.kind, "name": release.name, "version": release.version}
        rows = [_device_row(key, client, release.devices[client]) for client in clients if client in release.devices]
        doing, why = f"write release {release.version} of {release.name!r}", list(whys)
        with self._transaction(doing, fsynced=bool(why)) as db:
            values = {name: getattr(release, name) for name in _CHANGING}
            db.execute(sa.update(releases).filter_by(**key).values(values))
            for first in range(0, len(rows), _AT_ONCE):
                some = rows[first : first + _AT_ONCE]
                named = release_devices.c.client_id.in_([row["client_id"] for row in some])
                db.execute(sa.delete(release_devices).filter_by(**key).where(named))
                db.execute(sa.insert(release_devices), some)
            sql.write_history(db, *why)

    def releases(self, kind: Kind) -> list[ReleaseRecord]:
        """All releases of a kind, the oldest first."""
        query = sa.select(releases).filter_by(kind=kind)
        query = query.order_by(releases.c.created_at, releases.c.name, releases.c.version)
        return [ReleaseRecord(**{**row, "kind": kind}) for row in self._read("releases", query)]

    def release_devices(
        self, kind: Kind, name: str, version: int, after: str = "", limit: int = 1 << 30
    ) -> dict[str, Device]:
        """At most `limit` devices of a release, in the order of id bytes, after a client."""
        client_id = release_devices.c.client_id.collate(self._byte_order)
        query = sa.select(release_devices).filter_by(kind=kind, name=name, version=version).where(client_id > after)
        rows = self._read("the devices of a release", query.order_by(client_id).limit(limit))
        return {row["client_id"]: _device(row) for row in rows}


def _device_row(key: Mapping[str, Any], client: str, device: Device) -> dict[str, Any]:
    values = {field.name: getattr(device, field.name) for field in fields(device)}
    plain = {"state": device.state.value, "metrics": dict(device.metrics), "before": dict(device.before)}
    return {**key, "client_id": client, **values, **plain}


def _device(row: sa.RowMapping) -> Device:
    values = {field.name: row[field.name] for field in fields(Device)}
    return Device(**{**values, "state": DeviceState(row["state"])})


class ClientLedger(Transactions):
    """The part of the `Store` for clients."""

    def put_clients(self, clients: Sequence[ClientRecord], whys: Sequence[HistoryRecord] = ()) -> None:
        """Add or replace clients, except their counters, which only updates and commits change.

        Of several records of one client the last one counts. whys: lines of history, in order.
        """
        table, latest = schema.clients, {client.client_id: sql.to_row(client) for client in clients}
        with self._transaction(f"write clients {', '.join(latest)[:200]}") as db:
            known = set(db.execute(_KNOWN, {"ids": list(latest)}).scalars())
            fresh = [row | _NO_UPDATES for client_id, row in latest.items() if client_id not in known]
            again = [_without_counters(latest[client_id]) for client_id in latest if client_id in known]
            # A list of rows is one statement; an empty one would be a row of defaults.
            if fresh:
                db.execute(sa.insert(table), fresh)
            if again:
                db.execute(_AGAIN, again)
            sql.write_history(db, *whys)

    def forget_client(self, client_id: str, why: HistoryRecord) -> bool:
        """Remove a client from the roster, with its quarantine record, its client states, and its part in releases.

        Returns False if there is no such client. History and updates stay. Of a banned client `only_banned` stays: a
        ban ends only by unbanning.
        """
        with self._transaction(f"forget client {client_id!r}") as db:
            client = sql.find(db, schema.clients, client_id=client_id)
            if client is None:
                return False
            db.execute(sa.delete(schema.clients).filter_by(client_id=client_id))
            if client["banned"]:
                db.execute(sa.insert(schema.clients), sql.to_row(only_banned(sql.client_of(client))))
            for table in (schema.quarantines, schema.client_states, release_devices):
                db.execute(sa.delete(table).filter_by(client_id=client_id))
            sql.write_history(db, why)
            return True

    def client(self, client_id: str) -> ClientRecord | None:
        """One client; None if it is not on the roster."""
        clients = self._rows("a client", schema.clients, client_id=client_id)
        return sql.client_of(clients[0]) if clients else None

    def clients(self) -> list[ClientRecord]:
        """All clients in the order of id bytes."""
        clients = map(sql.client_of, self._read("clients", sa.select(schema.clients)))
        return sorted(clients, key=lambda client: client.client_id.encode())

    def clients_of(self, client_ids: Sequence[str]) -> list[ClientRecord]:
        """The records of these clients, at most 1,000, in the order of id bytes; unknown ones are left out."""
        query = sa.select(schema.clients).where(schema.clients.c.client_id.in_(client_ids))
        return sorted(map(sql.client_of, self._read("clients", query)), key=lambda client: client.client_id.encode())

    def update_counts(self) -> dict[str, int]:
        """Counted updates of each client."""
        query = sa.select(schema.clients.c.client_id, schema.clients.c.updates_counted)
        return {row["client_id"]: row["updates_counted"] for row in self._read("counters of clients", query)}

    def work_of(self, client_ids: Sequence[str]) -> dict[str, ClientWork]:
        """What became of the work of these clients, at most 1,000; unknown ones are left out."""
        table = schema.clients
        query = sa.select(table.c.client_id, table.c.work).where(table.c.client_id.in_(client_ids))
        return {row["client_id"]: ClientWork.of(row["work"]) for row in self._read("work of clients", query)}

    def count_lost(self, client_id: str) -> None:
        """Count that a client was lost, banned or forgotten while it worked. An unknown client is ignored."""
        with self._transaction(f"count lost work of {client_id!r}") as db:
            sql.count_work(db, {client_id: lambda work: work.ended("lost")})

    def quarantine_records(self) -> list[QuarantineRecord]:
        """The quarantine records of clients, in the order of id bytes."""
        records = [QuarantineRecord(**row) for row in self._read("quarantine records", sa.select(schema.quarantines))]
        return sorted(records, key=lambda record: record.client_id.encode())

    def put_quarantine_record(self, quarantine: QuarantineRecord, why: HistoryRecord | None = None) -> None:
        """Replace a client's quarantine record. An unknown client is ignored."""
        with self._transaction(f"write the quarantine record of {quarantine.client_id!r}") as db:
            sql.replace_quarantine_record(db, quarantine, why)

    def put_quarantine_records(self, records: Sequence[tuple[QuarantineRecord, HistoryRecord | None]]) -> None:
        """`put_quarantine_record` for several clients, in one transaction."""
        with self._transaction(f"write {len(records)} quarantine records") as db:
            for record, why in records:
                sql.replace_quarantine_record(db, record, why)

    def clear_quarantine_record(self, client_id: str, why: HistoryRecord) -> bool:
        """Remove a client's quarantine record, its newest work, and its count of lost states in every run.

        Returns False if there was neither; no history is written then.
        """
        states = schema.client_states
        lost = sa.update(states).where(states.c.client_id == client_id, states.c.losses > 0)
        with self._transaction(f"clear the quarantine record of {client_id!r}") as db:
            changed = db.execute(sa.delete(schema.quarantines).filter_by(client_id=client_id)).rowcount > 0
            changed = db.execute(lost.values(losses=0)).rowcount > 0 or changed
            client = sql.find(db, schema.clients, client_id=client_id)
            if client is not None and (work := ClientWork.of(client["work"])).newest:
                sql.count_work(db, {client_id: ClientWork.released})
                changed = changed or work.of_newest()["admitted"] < len(work.newest)
            if changed:
                sql.write_history(db, why)
            return changed

    def client_state_records(self, run_id: str) -> list[ClientStateRecord]:
        """The records of clients' states in a run, in the order of id bytes."""
        states = [ClientStateRecord(**row) for row in self._rows("client states", schema.client_states, run_id=run_id)]
        return sorted(states, key=lambda state: state.client_id.encode())

    def put_client_state_records(
        self,
        states: Sequence[ClientStateRecord],
        quarantine: QuarantineRecord | None = None,
        whys: Sequence[HistoryRecord] = (),
    ) -> None:
        """Add or replace these records, with one quarantine record and lines of history, in one transaction.

        Unknown clients are ignored.
        """
        with self._transaction("write client states") as db:
            for state in states:
                if sql.find(db, schema.clients, client_id=state.client_id):
                    db.execute(
                        sa.delete(schema.client_states).filter_by(run_id=state.run_id, client_id=state.client_id)
                    )
                    db.execute(sa.insert(schema.client_states), sql.to_row(state))
            sql.replace_quarantine_record(db, quarantine, None)
            sql.write_history(db, *whys)


def _without_counters(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in _NO_UPDATES} | {"id_of_row": row["client_id"]}
