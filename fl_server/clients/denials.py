"""The list of revocations and bans in a file beside the ledger, so that a restored backup of the ledger undoes none.

The file is written again with each change. A start reads it, and every other `denials*.json` in the state directory,
and applies what the ledger lacks. k8s/tools/restore.sh puts the lists of after the backup there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError

from fl_common.atomic_files import atomic_writer
from fl_common.settings import Section, SettingsError
from fl_server.audit.log import AuditLog
from fl_server.audit.writer import AuditRecord
from fl_server.clients.fleet import Fleet
from fl_server.clients.operator_actions import OperatorActions
from fl_server.config import ServerConfig
from fl_server.enrollment.revocations import Revocations
from fl_server.store.certificates import RevocationRecord
from fl_server.store.ledger import Ledger
from fl_server.store.records import HistoryRecord

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
            {"client": each.client_id, "reason": each.note}
            for each in clients
            if each.banned and each.client_id != lifted
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
        found = [await self.ledger.do(_read, path) for path in paths if path.exists()]
        for lists in found:
            for row in self._lacking(lists.revocations):
                await self._revoke(row)
                await audit.record(_row(f"{row.kind} {row.value}", row.reason))
            for ban in lists.bans:
                if (known := self.fleet.known(ban.client)) is None or not known.banned:
                    await OperatorActions(self.ledger, self.fleet).ban(ban.client, ban.reason, ACTOR)
                    await audit.record(_row(f"ban {ban.client}", ban.reason))
        await self.write()
        for path in paths:
            if path != self.path:
                path.unlink()

    def _lacking(self, rows: Iterable[RevocationRecord]) -> list[RevocationRecord]:
        return [row for row in rows if not self.revocations.includes(row)]

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
