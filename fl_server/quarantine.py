"""Quarantine: a client whose updates are refused again and again is not drawn for a while.

Refusals in a row are counted over all runs, and an update that counts ends the row. From the `after`th on, each refusal
quarantines the client for twice as long as the one before, up to a limit. Only what a client did wrong itself counts:
coming late, or from a state that was given up meanwhile, may happen to anybody. A lost client state counts as a
refusal. Failures of work that the client reports have a row of their own, which begins to cost at `failures`. Time is
the clock on the wall, so that a restart changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
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


Verdict = tuple[Standing | None, HistoryRecord | None]
"""What stands against the client from now on, if that changes; and the line of history, if it is quarantined."""


class Quarantine:
    """What stands against each client. Lives on the event loop; the ledger has the same."""

    def __init__(self, rules: QuarantineConfig) -> None:
        self._rules = rules
        self._standings: dict[str, Standing] = {}

    def read_back(self, standings: Iterable[Standing]) -> None:
        """Take over what the ledger has: at a start, and when a commit has ended what stood against its clients."""
        self._standings = {standing.client_id: standing for standing in standings}

    def weigh(self, update: UpdateRecord) -> Verdict:
        """What would stand against the client once this update is entered, and why it would be quarantined for it."""
        if update.admitted or update.reason not in FAULTS:
            return None, None
        word = update.reason.removeprefix("REFUSAL_REASON_").lower()
        what = f"the last one in run {update.run_id} round {update.round} ({word}): {update.detail}"
        return self._weigh_refusal(update.client_id, ("an update refused", "updates refused"), what)

    def weigh_loss(self, client: str, what: str) -> Verdict:
        """`weigh` for a client state that the client reports as lost, rightly or not. It counts as a refusal does."""
        words = ("an update refused or a state lost", "updates refused or states lost")
        return self._weigh_refusal(client, words, what)

    def _weigh_refusal(self, client: str, words: tuple[str, str], what: str) -> Verdict:
        if not self._rules.after:
            return None, None
        before = self._before(client)
        refusals = before.refusals + 1
        reason = f"{_in_a_row(refusals, words)}, {what}"
        standing = replace(before, refusals=refusals, reason=reason)
        return self._judge(standing, refusals - self._rules.after)

    def weigh_failure(self, client: str, what: str) -> Verdict:
        """`weigh` for work that the client says it cannot do. It counts apart from refusals."""
        if not self._rules.failures:
            return None, None
        before = self._before(client)
        failures = before.failures + 1
        reason = f"{_in_a_row(failures, ('a piece of work failed', 'pieces of work failed'))}, the last one in {what}"
        standing = replace(before, failures=failures, reason=reason)
        return self._judge(standing, failures - self._rules.failures)

    def _before(self, client: str) -> Standing:
        return self._standings.get(client) or Standing(client, 0, 0.0, "")

    def _judge(self, standing: Standing, beyond: int) -> Verdict:
        """beyond: by how much the count exceeds the one at which a quarantine begins; below 0 there is none yet."""
        if beyond < 0:
            return standing, None
        now, seconds = time.time(), self._seconds(beyond)
        standing = replace(standing, until=max(standing.until, now + seconds))
        until = f"{datetime.fromtimestamp(standing.until, UTC):%Y-%m-%d %H:%M:%S} UTC"
        why = f"for {seconds:g} s, until {until}: {standing.reason}"
        return standing, HistoryRecord(now, "coordinator", "client_quarantined", standing.client_id, why)

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
        if standing is None:
            return 0.0
        judged = (self._rules.after and standing.refusals) or (self._rules.failures and standing.failures)
        return max(0.0, standing.until - time.time()) if judged else 0.0

    def clients(self) -> list[str]:
        """Who is quarantined now."""
        return [client for client in self._standings if self.seconds_left(client)]

    def drop(self, client: str) -> None:
        """Nothing stands against the client any more."""
        self._standings.pop(client, None)

    def _seconds(self, beyond: int) -> float:
        doublings = min(beyond, 64)  # a float can be doubled no more than about a thousand times
        return min(self._rules.first_s * 2.0**doublings, self._rules.longest_s)


def _in_a_row(count: int, words: tuple[str, str]) -> str:
    one, many = words
    return f"{count} {many} in a row" if count > 1 else one
