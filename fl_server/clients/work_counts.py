"""What became of the work of all clients, in memory, as the ledger has counted it.

Only the ledger counts (`fl_server.store.client_work`). After an event in it, the counts of the clients concerned are
read again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from fl_server.clients.client_records import ClientRecords
from fl_server.store.client_work import ClientWork
from fl_server.store.ledger import MOST_CLIENTS, Ledger
from fl_server.store.records import ClientRecord

_NOTHING = ClientWork()


class WorkCounts:
    """The counts by client. Lives on the event loop; a scraper's thread may read `of`."""

    def __init__(self, ledger: Ledger, records: ClientRecords) -> None:
        self._ledger, self._records = ledger, records
        self._by_client: dict[str, ClientWork] = {}

    def restore(self, records: Iterable[ClientRecord]) -> None:
        """Take over what the ledger has at a start."""
        self._by_client = {record.client_id: record.work for record in records}

    def of(self, client_id: str) -> ClientWork:
        """The counts of a client; all 0 for one without any work."""
        return self._by_client.get(client_id, _NOTHING)

    def changed(self, client_ids: Collection[str]) -> None:
        """Read the counts of these clients again, in the background. The ledger's calls run in order."""
        if client_ids:
            self._records.in_background(partial(self._read, list(client_ids)))

    def count_lost(self, client_id: str) -> None:
        """Count that a client was lost, banned or forgotten while it worked.

        After a kill before the write the client is waited for again, and counted when it is lost again.
        """
        self._records.in_background(partial(self._ledger.do, self._ledger.store.count_lost, client_id))
        self.changed([client_id])

    def forget(self, client_id: str) -> None:
        """Drop the counts of a client that was forgotten."""
        self._by_client.pop(client_id, None)

    async def _read(self, client_ids: list[str]) -> None:
        for first in range(0, len(client_ids), MOST_CLIENTS):
            some = client_ids[first : first + MOST_CLIENTS]
            self._by_client.update(await self._ledger.do(self._ledger.store.work_of, some))
