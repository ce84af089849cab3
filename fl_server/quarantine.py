"""Quarantine: a client whose updates are refused again and again is not drawn for a while.

Refusals in a row are counted over all runs, and an update that counts ends the row. From the `after`th on, each refusal
quarantines the client for twice as long as the one before, up to a limit. Only what a client did wrong itself counts:
coming late, or from a state that was given up meanwhile, may happen to anybody. Time is the clock on the wall, so that
a restart changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime

from fl_server.config import QuarantineConfig
from fl_server.store.base import HistoryRecord, Standing, UpdateRecord
from protos.fl.v1.training_pb2 import RefusalReason

FAULTS = frozenset(
    RefusalReason.Name(reason)
    for reason in (
        RefusalReason.REFUSAL_REASON_HEADER,
        RefusalReason.REFUSAL_REASON_LAYOUT,
        RefusalReason.REFUSAL_REASON_SIZE,
        RefusalReason.REFUSAL_REASON_DIGEST,
        RefusalReason.REFUSAL_REASON_NOT_FINITE,
        RefusalReason.REFUSAL_REASON_NORM,
    )
)
"""Names of the reasons for which a refusal is the client's own fault."""


class Quarantine:
    """What stands against each client. Lives on the event loop; the ledger has the same."""

    def __init__(self, rules: QuarantineConfig) -> None:
        self._rules = rules
        self._standings: dict[str, Standing] = {}

    def read_back(self, standings: Iterable[Standing]) -> None:
        """Take over what the ledger has: at a start, and when a commit has ended what stood against its clients."""
        self._standings = {standing.client_id: standing for standing in standings}

    def weigh(self, update: UpdateRecord) -> tuple[Standing | None, HistoryRecord | None]:
        """What would stand against the client once this update is entered, and why it would be quarantined for it."""
        if update.admitted or update.reason not in FAULTS or not self._rules.after:
            return None, None
        before = self._standings.get(update.client_id)
        refusals = 1 + (before.refusals if before else 0)
        word = update.reason.removeprefix("REFUSAL_REASON_").lower()
        in_a_row = f"{refusals} updates refused in a row" if refusals > 1 else "an update refused"
        reason = f"{in_a_row}, the last one in run {update.run_id} round {update.round} ({word}): {update.detail}"
        if refusals < self._rules.after:
            return Standing(update.client_id, refusals, before.until if before else 0.0, reason), None
        now, seconds = time.time(), self._seconds(refusals)
        standing = Standing(update.client_id, refusals, now + seconds, reason)
        why = f"for {seconds:g} s, until {datetime.fromtimestamp(standing.until, UTC):%Y-%m-%d %H:%M:%S} UTC: {reason}"
        return standing, HistoryRecord(now, "coordinator", "client_quarantined", update.client_id, why)

    def keep(self, standing: Standing) -> None:
        """This is in the ledger now."""
        self._standings[standing.client_id] = standing

    def standing(self, client: str) -> Standing | None:
        """What stands against the client, whether or not it is quarantined for it."""
        return self._standings.get(client)

    def of(self, client: str) -> Standing | None:
        """Why the client is quarantined, and until when; None if it is not."""
        standing = self._standings.get(client)
        return standing if standing is not None and self.seconds_left(client) else None

    def seconds_left(self, client: str) -> float:
        """Until the client may be drawn again; 0 if it may be."""
        standing = self._standings.get(client)
        return max(0.0, standing.until - time.time()) if standing is not None and self._rules.after else 0.0

    def clients(self) -> list[str]:
        """Who is quarantined now."""
        return [client for client in self._standings if self.seconds_left(client)]

    def drop(self, client: str) -> None:
        """Nothing stands against the client any more."""
        self._standings.pop(client, None)

    def _seconds(self, refusals: int) -> float:
        doublings = min(refusals - self._rules.after, 64)  # a float can be doubled no more than about a thousand times
        return min(self._rules.first_s * 2.0**doublings, self._rules.longest_s)
