"""Downloads of clients: the checks, limits and counts of one, whether this process sends its bytes or a worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ref

from fl_server.aggregation.outgoing import Broadcast
from fl_server.clients.sessions import Transfer
from fl_server.errors import InvalidInput, NoSuchResource
from fl_server.run.round_statistics import ClientTransfer, ClientTransfers
from fl_server.runs.coordinator import Coordinator
from fl_server.services import Services
from protos.codec import digest_bytes, digest_text
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2


class Download:
    """One open download of a client."""

    def __init__(
        self, services: Services, coordinator: Coordinator, request: pb.FetchModelRequest, transfer: Transfer
    ) -> None:
        """Raises InvalidInput, NoSuchResource."""
        self.digest, self._transfer = digest_in(request.digest, "digest"), transfer
        self._run, broadcast = coordinator.resource(self.digest, request.run_id, transfer.client_id)
        self.size_bytes = broadcast.resource.size_bytes
        if request.offset > self.size_bytes:
            raise InvalidInput("offset", f"at most the size, {self.size_bytes}", request.offset)
        self._services, self._client, self._offset = services, transfer.client_id, request.offset
        self._limits = services.fleet.transfer_limits.of(self._client)
        self._fetch = self._limits.allowance.fetch(self.digest, len(broadcast.header) + self.size_bytes)
        self._sent, self.places = services.metrics.bytes.labels("down", broadcast.kind), broadcast.places(self._offset)
        if broadcast.kind == "model" and self._run is not None:
            self._run.rounds.bytes.download_started(self._client, self._offset)
        # A slow reader keeps no model of an earlier round in memory: its run alone does. Looked up once, for a search
        # through all runs for each message would be most of the work for a large model.
        self._kept = ref(broadcast)
        # An earlier model, which the client evaluates, is no transfer of the exchange under way.
        rounds = self._run.rounds if self._run and any(sent is broadcast for sent in self._run.model.sent) else None
        self._transfers = ClientTransfers() if rounds is None else rounds.transfers
        self._shown: ClientTransfer

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The transfer of the bytes, for tables and counts."""
        with self._transfers.transfer(self._client, "down", self.size_bytes, self._offset) as self._shown:
            yield

    def message(self, place: int) -> tuple[bytes, int]:
        """A message of the resource, and its tensor bytes. Raises NoSuchResource if no run sends it any more."""
        if (broadcast := self._kept()) is None:
            raise NoSuchResource(digest_text(self.digest))
        return broadcast.message(place)

    def charge(self, count: int, overhead: int = 0) -> None:
        """So many bytes are about to be sent. overhead: of a message without any. Raises what ends the download."""
        self._transfer.check()
        if excess := self._fetch.send(count or overhead, time.monotonic()):
            raise self._services.fleet.transfer_limits.exceeded(self._client, excess)
        self._shown.done += count  # before: a client that has all may be gone before this goes on

    def complete(self) -> None:
        """The last message is about to be sent."""
        self._transfer.resource_sent(self.digest)

    async def sent(self, count: int) -> None:
        """So many bytes have gone. Returns when the next ones may go."""
        self._sent.inc(count)
        if self._run is not None:
            self._run.rounds.bytes.total_down += count
        await self._limits.pace(count)


def resource_messages(broadcast: Broadcast) -> Iterator[bytes]:
    """All messages of a resource."""
    for place in broadcast.places(0):
        yield broadcast.message(place)[0]


def digest_in(message: tensor_pb2.Digest, field: str) -> bytes:
    """The digest in a request. Raises InvalidInput."""
    try:
        return digest_bytes(message)
    except ValueError as error:
        raise InvalidInput(field, "a BLAKE3-256 digest", str(error)) from error
