"""What operators do to clients: ban, release, drain, forget. Each is written to the ledger before it takes effect."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from fl_common.files import atomic_writer
from fl_common.settings import Section, SettingsError
from fl_server.audit.log import AuditLog
from fl_server.audit.writer import AuditRecord
from fl_server.clients.fleet import Fleet
from fl_server.clients.registration_request import unregistered
from fl_server.enrollment.revocations import Revocations
from fl_server.errors import one_line
from fl_server.settings.config import ServerConfig
from fl_server.store.certificates import RevocationRecord
from fl_server.store.ledger import Ledger
from fl_server.store.records import HistoryRecord
from protos.fl.v1 import coordinator_pb2 as pb


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
        """End the client's quarantine, let it back into runs that left it out, and reset its counts.

        Does nothing if there is nothing to end. Raises NoSuchClient.
        """
        self._fleet.records.get(client_id)
        why = HistoryRecord(time.time(), actor, "client_released", client_id)
        await self._ledger.do(self._ledger.store.clear_quarantine_record, client_id, why)
        self._fleet.release(client_id)

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


log = structlog.get_logger()

FILE = "denials.json"
ACTOR = "restore"
"""Who applied a denial, in history and audit."""
RESTORED = "denial_restored"
"""Method of the audit row."""


class Ban(Section):
    """A banned client."""

    client: str
    reason: str


class Lists(Section):
    """The content of a file."""

    revocations: list[RevocationRecord]
    bans: list[Ban]


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
            await self.ledger.do(_write, self.path, {"revocations": rows, "bans": bans})
        except OSError as error:
            log.error(
                "denials_not_written", path=str(self.path), reason=error.strerror, todo="make the folder writable"
            )

    async def restore(self, audit: AuditLog) -> None:
        """Apply what the ledger lacks, each with a row of the audit log. Raises SettingsError for an unusable file."""
        paths = sorted({*self.config.state_dir.glob("denials*.json"), self.path})
        files = [await self.ledger.do(_read, path) for path in paths if path.exists()]
        for lists in files:
            for row in lists.revocations:
                if not self.revocations.includes(row):
                    await self._revoke(row)
                    await audit.record(_row(f"{row.kind} {row.value}", row.reason))
            for ban in lists.bans:
                if (known := self.fleet.records.find(ban.client)) is None or not known.banned:
                    await OperatorActions(self.ledger, self.fleet).ban(ban.client, ban.reason, ACTOR)
                    await audit.record(_row(f"ban {ban.client}", ban.reason))
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
