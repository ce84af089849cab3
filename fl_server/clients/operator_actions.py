"""What operators do to clients: ban, release, drain, forget. Each is written to the ledger before it takes effect."""

from __future__ import annotations

import time
from dataclasses import replace

from fl_server.clients.fleet import Fleet
from fl_server.clients.registration_request import unregistered
from fl_server.errors import one_line
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
        known, reason = self._fleet.known(client_id) or unregistered(client_id), one_line(reason)
        record = replace(known, banned=True, note=reason, present=False)
        await self._fleet.records.write(record, HistoryRecord(time.time(), actor, "client_banned", client_id, reason))
        self._fleet.expel(client_id, f"to be unbanned (banned: {reason})", "banned")

    async def unban(self, client_id: str, actor: str) -> None:
        """Let the client register again. Raises NoSuchClient."""
        record = replace(self._fleet.record(client_id), banned=False, note="")
        await self._fleet.records.write(record, HistoryRecord(time.time(), actor, "client_unbanned", client_id))

    async def release(self, client_id: str, actor: str) -> None:
        """End the client's quarantine, let it back into runs that left it out, and reset its counts.

        Does nothing if there is nothing to end. Raises NoSuchClient.
        """
        self._fleet.record(client_id)
        why = HistoryRecord(time.time(), actor, "client_released", client_id)
        await self._ledger.do(self._ledger.store.clear_quarantine_record, client_id, why)
        self._fleet.release(client_id)

    async def drain(self, client_id: str, reason: str, undo: bool, actor: str) -> None:
        """Give the client no new work; `undo` ends that. Raises NoSuchClient."""
        reason = one_line(reason)
        event = "client_undrained" if undo else "client_drained"
        record = replace(self._fleet.record(client_id), draining=not undo, note="" if undo else reason)
        await self._fleet.records.write(record, HistoryRecord(time.time(), actor, event, client_id, reason))
        if not undo:
            self._fleet.push(client_id, pb.AttendResponse(drain=pb.Drain(reason=reason)))

    async def forget(self, client_id: str, actor: str) -> bool:
        """Remove the client. Returns True if it is banned: a ban stays. Raises NoSuchClient."""
        banned = self._fleet.record(client_id).banned
        why = HistoryRecord(time.time(), actor, "client_forgotten", client_id, "its ban stays" if banned else "")
        await self._ledger.do(self._ledger.store.forget_client, client_id, why)
        self._fleet.forget(client_id)
        return self._fleet.known(client_id) is not None
