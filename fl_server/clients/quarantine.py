"""Quarantine: a client whose updates are refused repeatedly is not drawn for a while.

Refusals in a row are counted over all runs; an update that counts resets the count. From refusal number `after` on,
each refusal quarantines the client for twice as long as the one before, up to a limit. Only the client's own faults
count, not a late update, one made from an abandoned state, or one that is only longer than those of other clients. A
lost client state counts as a refusal. Failures of work that the client reports are counted separately, with the limit
`failures`, and so are the deadlines that it misses while others deliver, with the limit `deadlines`. Times are of the
wall clock, so that a restart changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fl_common.units import duration, utc
from fl_server.rounds.events import Fault
from fl_server.settings.config import QuarantineConfig
from fl_server.store.records import HistoryRecord, QuarantineRecord, UpdateRecord

FAULTS = frozenset({"header", "layout", "size", "digest", "not_finite", "norm"})
"""The refusal reasons that are the client's own fault."""
_SHARED: Mapping[str, Fault] = {
    "REFUSAL_REASON_NOT_FINITE": "not_finite",
    "REFUSAL_REASON_NORM": "norm",
    "REFUSAL_REASON_RELATIVE_NORM": "norm",
    "REFUSAL_REASON_LAYOUT": "layout",
}
"""Faults that several clients may have in common, and then they are faults of the run."""

Verdict = tuple[QuarantineRecord | None, HistoryRecord | None]
"""The client's new quarantine record, if it changes; and the history row of a new quarantine, if there is one."""


def fault_of(reason: str) -> Fault:
    """The fault that several clients may have in common. reason: the name of a RefusalReason."""
    return _SHARED.get(reason, "")


class Quarantine:
    """The quarantine records of all clients, which are also in the ledger. Lives on the event loop."""

    def __init__(self, rules: QuarantineConfig) -> None:
        self._rules = rules
        self._records: dict[str, QuarantineRecord] = {}

    def restore(self, records: Iterable[QuarantineRecord]) -> None:
        """Take over the ledger's records: at a start, and after a commit has reset those of its clients."""
        self._records = {record.client_id: record for record in records}

    def count_refusal(self, update: UpdateRecord, where: str) -> Verdict:
        """The verdict on a client once this refused update is in the ledger. Nothing is kept yet.

        where: the run and the round, in words.
        """
        if update.refused_for not in FAULTS:
            return None, None
        what = f"the last one in {where} ({update.refused_for}): {update.detail}"
        words = ("an update refused", "updates refused")
        return self._count(update.client_id, ("refusals", self._rules.after), words, what)

    def count_lost_state(self, client: str, what: str) -> Verdict:
        """The verdict for a client state that the client reports as lost. It counts as a refusal."""
        words = ("an update refused or a state lost", "updates refused or states lost")
        return self._count(client, ("refusals", self._rules.after), words, what)

    def count_failure(self, client: str, what: str) -> Verdict:
        """The verdict for work that the client reports as failed. It is counted separately from refusals."""
        words = ("a piece of work failed", "pieces of work failed")
        return self._count(client, ("failures", self._rules.failures), words, f"the last one in {what}")

    def count_deadline(self, client: str, what: str) -> Verdict:
        """The verdict for a deadline that passed without the client's update. It is counted separately."""
        words = ("a deadline missed", "deadlines missed")
        return self._count(client, ("deadlines", self._rules.deadlines), words, what)

    def _count(self, client: str, counter: tuple[str, int], words: tuple[str, str], what: str) -> Verdict:
        """counter: a field of QuarantineRecord, and the count at which a quarantine begins; 0 for none."""
        name, limit = counter
        if not limit:
            return None, None
        before = self._records.get(client) or QuarantineRecord(client, 0, 0.0, "")
        count = getattr(before, name) + 1
        in_a_row = f"{count} {words[1]} in a row" if count > 1 else words[0]
        changes: dict[str, Any] = {name: count, "reason": f"{in_a_row}, {what}"}
        return self._judge(replace(before, **changes), count - limit)

    def _judge(self, record: QuarantineRecord, beyond: int) -> Verdict:
        """beyond: how far the count is above the one at which a quarantine begins; below 0 there is none yet."""
        if beyond < 0:
            return record, None
        doublings = min(beyond, 64)  # a float overflows after about a thousand doublings
        now, seconds = time.time(), min(self._rules.first_s * 2.0**doublings, self._rules.longest_s)
        record = replace(record, until=max(record.until, now + seconds))
        why = f"for {duration(seconds)}, until {utc(record.until)}: {record.reason}"
        return record, HistoryRecord(now, "coordinator", "client_quarantined", record.client_id, why)

    def keep(self, record: QuarantineRecord) -> None:
        """Keep a record that is in the ledger."""
        self._records[record.client_id] = record

    def refusals_of(self, client: str) -> QuarantineRecord | None:
        """The client's quarantine record, quarantined or not."""
        return self._records.get(client)

    def of(self, client: str) -> QuarantineRecord | None:
        """The quarantine record of a quarantined client; None if it is not quarantined."""
        record = self._records.get(client)
        return record if record is not None and self.seconds_left(client) else None

    def seconds_left(self, client: str) -> float:
        """Seconds until the quarantine ends; 0 without one."""
        record = self._records.get(client)
        if record is None:
            return 0.0
        after, failures, deadlines = self._rules.after, self._rules.failures, self._rules.deadlines
        judged = (after and record.refusals) or (failures and record.failures) or (deadlines and record.deadlines)
        return max(0.0, record.until - time.time()) if judged else 0.0

    def clients(self) -> list[str]:
        """The clients that are quarantined now; also for a scraper's thread."""
        return [client for client in list(self._records) if self.seconds_left(client)]

    def drop(self, client: str) -> None:
        """Drop the client's record."""
        self._records.pop(client, None)
