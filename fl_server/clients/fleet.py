"""The clients of one coordinator: its parts by subject, and what concerns all of them.

`attendance` knows who is connected, `streams` has the messages to each client, `records` what the ledger keeps,
`eligibility` who may be drawn, `quarantine` who is not drawn for a while, `sessions` the calls.
"""

from __future__ import annotations

from contextlib import suppress

import structlog

from fl_common.rate_limits import TokenBuckets
from fl_server.clients.attendance import Attendance, Streams
from fl_server.clients.client_records import ClientRecords, FleetChanges
from fl_server.clients.contested_identities import ContestedIdentities
from fl_server.clients.eligibility import Eligibility
from fl_server.clients.quarantine import Quarantine
from fl_server.clients.registration import Registration
from fl_server.clients.roster import Presence
from fl_server.clients.sessions import Session, Sessions
from fl_server.clients.transfer_limits import TransferLimits
from fl_server.errors import Forbidden, UnknownSessionError
from fl_server.metrics import Metrics
from fl_server.settings.config import ServerConfig
from fl_server.store.ledger import Ledger
from fl_server.store.records import HistoryRecord, QuarantineRecord
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()


class Fleet:
    """All clients of one coordinator. Lives on the event loop."""

    def __init__(self, ledger: Ledger, config: ServerConfig, metrics: Metrics) -> None:
        self._ledger, self._metrics = ledger, metrics
        limits, transfers = config.limits, config.transfers
        self.changes = FleetChanges(lambda: len(self.records), self._update_metrics)
        self.records = ClientRecords(ledger, self.changes)
        self.sessions = Sessions()
        self.attendance = Attendance(self.records, self.sessions, limits.reattach_grace_s)
        self.transfer_limits = TransferLimits(transfers, metrics, limits.max_clients)
        self.streams = Streams(self.sessions, self.attendance, self.transfer_limits, transfers.messages_waiting)
        self.quarantine = Quarantine(config.quarantine)
        returns = TokenBuckets(limits.comebacks_per_min, 60.0)
        self.eligibility = Eligibility(self.records, self.attendance, self.quarantine, returns)
        self.contested = ContestedIdentities(
            self.sessions, lambda client_id: bool(self.eligibility.run_of(client_id)), metrics
        )
        self.registration = Registration(config, self.records, self.sessions, self.contested)
        metrics.sessions.set_function(lambda: float(len(self.sessions)))

    async def start(self) -> None:
        """Read the clients back from the ledger. Those that were present are waited for."""
        await self.records.load()
        self.contested.restore(self.records.in_memory().values())
        self.attendance.restore()
        self.quarantine.restore(await self._ledger.do(self._ledger.store.quarantine_records))
        for client_id in self.quarantine.clients():
            self.eligibility.quarantine_changed(client_id)
        self.changes.changed()

    async def register(self, request: pb.RegisterRequest) -> tuple[Session, int]:
        """Open a session. Returns it and the protocol version."""
        session, protocol = await self.registration.register(request, self.attendance.close_unattended)
        self.eligibility.registered(request)
        return session, protocol

    def update_admitted(self, session_id: str) -> None:
        """An update was admitted in this session: its daemon is the one that works under the identity."""
        with suppress(UnknownSessionError):  # a newer session has fenced it
            self.contested.update_admitted(self.sessions.get(session_id))

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
        self.changes.released(client_id)
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
        self.changes.gone(client_id, "forgotten")

    def _end(self, client_id: str, needed: str) -> None:
        self.sessions.end(client_id, Forbidden(f"client:{client_id}", needed))
        self.attendance.forget(client_id)

    def _update_metrics(self) -> None:
        self._metrics.clients.labels("present").set(self.attendance.count(Presence.PRESENT))
        self._metrics.clients.labels("suspect").set(self.attendance.count(Presence.SUSPECT))
        self._metrics.quarantined.set(len(self.quarantine.clients()))
