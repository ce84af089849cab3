"""The clients of one coordinator: its parts by subject, what concerns all of them, and what operators do to them.

`attendance` knows who is connected, `streams` has the messages to each client, `records` what the ledger keeps,
`workers` who works for which run, `eligibility` who may be drawn, `quarantine` who is not drawn for a while, `sessions`
the calls.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from fl_common.files import atomic_writer
from fl_common.rate_limits import TokenBuckets
from fl_common.settings import Section, SettingsError
from fl_server.audit.log import AuditLog, AuditRecord
from fl_server.clients.attendance import Attendance, Presence, Streams
from fl_server.clients.client_records import ClientRecords, WorkCounts
from fl_server.clients.contested_identities import ContestedIdentities
from fl_server.clients.eligibility import Eligibility
from fl_server.clients.quarantine import Quarantine
from fl_server.clients.registration import Registration, unregistered
from fl_server.clients.sessions import Session, Sessions
from fl_server.clients.transfer_limits import TransferLimits
from fl_server.enrollment.grants import Revocations
from fl_server.errors import Forbidden, one_line
from fl_server.metrics import Metrics
from fl_server.settings.config import ServerConfig
from fl_server.store.database.ledger_certificates import RevocationRecord
from fl_server.store.ledger import Ledger
from fl_server.store.records import HistoryRecord, QuarantineRecord
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()
FILE = "denials.json"
ACTOR = "restore"
"""Who applied a denial, in history and audit."""
RESTORED = "denial_restored"
"""Method of the audit row."""


class Fleet:
    """All clients of one coordinator. Lives on the event loop."""

    def __init__(self, ledger: Ledger, config: ServerConfig, metrics: Metrics) -> None:
        self._ledger, self._metrics = ledger, metrics
        limits, transfers = config.limits, config.transfers
        self.records = ClientRecords(ledger)
        self.changes = self.records.changes
        self.sessions = Sessions()
        self.attendance = Attendance(self.records, self.sessions, limits.reattach_grace_s)
        self.transfer_limits = TransferLimits(transfers, metrics, limits.max_clients)
        self.streams = Streams(self.sessions, self.attendance, self.transfer_limits, transfers.messages_waiting)
        self.quarantine = Quarantine(config.quarantine)
        returns = TokenBuckets(limits.comebacks_per_min, 60.0)
        self.eligibility = Eligibility(self.records, self.attendance, self.quarantine, returns)
        self.workers = self.eligibility.workers
        self.work = WorkCounts(ledger, self.records)
        self.contested = ContestedIdentities(self.sessions, self.workers, metrics)
        self.registration = Registration(config, self.records, self.attendance, self.contested)
        metrics.sessions.set_function(lambda: float(len(self.sessions)))
        for presence in (Presence.PRESENT, Presence.SUSPECT):
            metrics.clients.labels(presence.value).set_function(partial(self.attendance.roster.count, presence))
        metrics.quarantined.set_function(lambda: float(len(self.quarantine.clients())))

    async def start(self) -> None:
        """Read the clients back from the ledger. Those that were present are waited for."""
        await self.records.load()
        self.work.restore(self.records.in_memory().values())
        self.contested.restore(self.records.in_memory().values())
        self.attendance.restore()
        self.quarantine.restore(await self._ledger.do(self._ledger.store.quarantine_records))
        for client_id in self.quarantine.clients():
            self.eligibility.quarantine_changed(client_id)
        self.changes.changed()

    async def register(self, request: pb.RegisterRequest) -> tuple[Session, int]:
        """Open a session. Returns it and the protocol version."""
        session, protocol = await self.registration.register(request)
        await self.records.note_resets(session.client_id, request.privacy_resets)
        self.eligibility.registered(request)
        return session, protocol

    def keep_refusals(self, refusals: QuarantineRecord, why: HistoryRecord | None) -> None:
        """Keep a client's refusals, which are in the ledger. `why`: the history row of a new quarantine."""
        self.quarantine.keep(refusals)
        if why is None:
            return
        self._metrics.quarantines.inc()
        log.warning("client_quarantined", client=refusals.client_id, why=why.detail)
        text = f"the coordinator gives this client no work {why.detail}"
        self.streams.push(refusals.client_id, pb.AttendResponse(notice=pb.Notice(text=text)))
        self.eligibility.quarantine_changed(refusals.client_id)

    def release(self, client_id: str) -> None:
        """Drop the client's refusals here, and let it back into all runs. The ledger has done so already."""
        self.work.changed([client_id])
        self.changes.listener.client_released(client_id)
        self.eligibility.release(client_id)

    def expel(self, client_id: str, needed: str, reason: str) -> None:
        """End what the client does, and wait for it no longer. `needed`: what its errors name as the way back."""
        self._end(client_id, needed)
        self.changes.gone(client_id, reason)

    def forget(self, client_id: str) -> None:
        """Expel the client, and drop all that is known of it. A ban stays."""
        self.records.forget(client_id)
        self._end(client_id, "to register again: it was forgotten here")
        self.sessions.forget(client_id)
        self.eligibility.forget(client_id)
        self.contested.forget(client_id)
        self.registration.forget(client_id)
        self.work.forget(client_id)
        self.changes.gone(client_id, "forgotten")

    def _end(self, client_id: str, needed: str) -> None:
        self.sessions.end(client_id, Forbidden(f"client:{client_id}", needed))
        self.attendance.roster.forget(client_id)


class OperatorActions:
    """Actions on the clients of one coordinator. `actor` is the operator, as history shows it."""

    def __init__(self, ledger: Ledger, fleet: Fleet) -> None:
        self._ledger = ledger
        self._fleet = fleet

    async def ban(self, client_id: str, reason: str, actor: str) -> None:
        """Refuse the client from now on, and end what it does. It need not have registered yet."""
        known, reason = self._fleet.records.find(client_id) or unregistered(client_id), one_line(reason)
        record = replace(known, banned=True, note=reason, present=False)
        await self._fleet.records.write(record, HistoryRecord(time.time(), actor, "client_banned", client_id, reason))
        self._fleet.expel(client_id, f"to be unbanned (banned: {reason})", "banned")

    async def unban(self, client_id: str, actor: str) -> None:
        """Let the client register again. Raises NoSuchClient."""
        record = replace(self._fleet.records.get(client_id), banned=False, note="")
        await self._fleet.records.write(record, HistoryRecord(time.time(), actor, "client_unbanned", client_id))

    async def release(self, client_id: str, actor: str) -> None:
        """End the client's quarantine, let it back into runs that left it out, reset its counts and remove its note.

        Does nothing if there is nothing to end. Raises NoSuchClient.
        """
        self._fleet.records.get(client_id)
        why = HistoryRecord(time.time(), actor, "client_released", client_id)
        await self._ledger.do(self._ledger.store.clear_quarantine_record, client_id, why)
        self._fleet.release(client_id)
        await self._fleet.records.clear_notes([client_id])

    async def drain(self, client_id: str, reason: str, undo: bool, actor: str) -> None:
        """Give the client no new work; `undo` ends that. Raises NoSuchClient."""
        reason = one_line(reason)
        event = "client_undrained" if undo else "client_drained"
        record = replace(self._fleet.records.get(client_id), draining=not undo, note="" if undo else reason)
        await self._fleet.records.write(record, HistoryRecord(time.time(), actor, event, client_id, reason))
        if not undo:
            self._fleet.streams.push(client_id, pb.AttendResponse(drain=pb.Drain(reason=reason)))

    async def forget(self, client_id: str, actor: str) -> bool:
        """Remove the client. Returns True if it is banned: a ban stays. Raises NoSuchClient."""
        banned = self._fleet.records.get(client_id).banned
        why = HistoryRecord(time.time(), actor, "client_forgotten", client_id, "its ban stays" if banned else "")
        await self._ledger.do(self._ledger.store.forget_client, client_id, why)
        self._fleet.forget(client_id)
        return self._fleet.records.find(client_id) is not None


class Ban(Section):
    """A banned client."""

    client: str
    reason: str


class Lists(Section):
    """The content of a file."""

    revocations: list[RevocationRecord]
    bans: list[Ban]
    epoch: int | None = None
    """The ledger's epoch at the last write."""


@dataclass(frozen=True)
class Denials:
    """Writes and applies the lists of one coordinator. Lives on the event loop, the ledger's thread has the files."""

    config: ServerConfig
    ledger: Ledger
    revocations: Revocations
    fleet: Fleet

    @property
    def path(self) -> Path:
        """The file."""
        return self.config.denials_file or self.config.state_dir / FILE

    async def write(self, lifted: str = "") -> None:
        """Write the file. lifted: a client whose ban is about to end.

        A failure is logged: the change itself is in the ledger, and the next start writes the file again.
        """
        clients = self.fleet.records.in_memory().values()
        bans = [
            {"client": client.client_id, "reason": client.note}
            for client in clients
            if client.banned and client.client_id != lifted
        ]
        rows = TypeAdapter(list[RevocationRecord]).dump_python(await self.ledger.do(self.ledger.store.revocations))
        try:
            epoch = self.ledger.store.claim.epoch
            await self.ledger.do(_write, self.path, {"epoch": epoch, "revocations": rows, "bans": bans})
        except OSError as error:
            log.error(
                "denials_not_written", path=str(self.path), reason=error.strerror, todo="make the folder writable"
            )

    async def restore(self, audit: AuditLog) -> None:
        """Apply what the ledger lacks, each with a row of the audit log. Raises SettingsError for an unusable file.

        A list that is older than another coordinator's time as the leader is not applied: the ledger has all of it,
        without what was lifted since.
        """
        paths = sorted({*self.config.state_dir.glob("denials*.json"), self.path})
        files = [await self.ledger.do(_read, path) for path in paths if path.exists()]
        newest = self.ledger.store.claim.epoch - 1
        for lists in (lists for lists in files if lists.epoch is None or lists.epoch >= newest):
            for row in lists.revocations:
                if not self.revocations.includes(row):
                    await self._revoke(row)
                    await audit.add(_row(f"{row.kind} {row.value}", row.reason))
            for ban in lists.bans:
                if (known := self.fleet.records.find(ban.client)) is None or not known.banned:
                    await OperatorActions(self.ledger, self.fleet).ban(ban.client, ban.reason, ACTOR)
                    await audit.add(_row(f"ban {ban.client}", ban.reason))
        await self.write()
        for path in paths:
            if path != self.path:
                path.unlink()

    async def _revoke(self, row: RevocationRecord) -> None:
        why = HistoryRecord(
            time.time(), ACTOR, "certificates_revoked", row.name or row.value, f"restored: {row.reason}"
        )
        await self.ledger.do(self.ledger.store.revoke, [row], why)
        await self.revocations.load()
        log.warning("denial_restored", kind=row.kind, value=row.value, reason=row.reason)


def _row(subject: str, reason: str) -> AuditRecord:
    return AuditRecord(ACTOR, "", RESTORED, subject, "ok", reason)


def _write(path: Path, content: dict[str, Any]) -> None:
    with atomic_writer(path) as file:
        file.write(json.dumps(content, indent=1).encode())


def _read(path: Path) -> Lists:
    try:
        return Lists.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise SettingsError(
            f"{path}: expected the revocations and bans that a coordinator wrote, got other content "
            f"({error.error_count()} errors, the first at {error.errors()[0]['loc']}): remove it, or restore it"
        ) from None
