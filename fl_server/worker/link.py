"""A worker's connection to the coordinator: its presence, and the calls that it makes for clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from fl_common.certificates.pem import Pem
from fl_server.errors import NotNow, Relayed, ServerError
from fl_server.identity import ANYBODY, address, caller
from protos.fl.v1 import errors_pb2
from protos.fl.v1 import worker_pb2 as pb
from protos.status import detail_of
from protos.wire import client_options

log = structlog.get_logger()

AGAIN_S = 1.0
"""Time after which a client tries again while the coordinator cannot be reached."""
RECONNECT_S = 0.5
"""Time between two tries to reach the coordinator at all of its addresses."""
CONNECT_MS = 5000
"""Longest time for a connection to one address: after it, another coordinator may lead."""
LONGEST_CALL_S = 3600.0
"""Calls in progress on an earlier connection go on for so long."""
CERTIFICATE_CHECK_S = 2.0
"""Period of the checks for a new certificate."""
_PATH = "/fl.v1.Workers/"
_OF_THE_COORDINATOR = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "ABORTED", "DATA_LOSS", "RESOURCE_EXHAUSTED"})
"""Statuses without a detail that are about the client's call, not about the worker or its connection."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the coordinator says when a worker attaches."""

    coordinator_id: str
    objects: str
    epoch: int


class Link:
    """The channel to the coordinator, for as long as the process lives. Lives on the event loop."""

    def __init__(self, servers: Sequence[str], name: str, software: str) -> None:
        """servers: the addresses of the coordinators, of which one leads."""
        self._servers, self._name, self._software = tuple(servers), name, software
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()
        """The ends of earlier connections, whose calls in progress go on."""
        self._problems: dict[str, str] = {}
        """Why an address cannot be used, as far as it is in the log."""
        self.terms: Terms | None = None
        """Those of the coordinator that is attached; None while there is none."""

    async def keep_attached(self, pem: Callable[[], Pem | None], attached: Callable[[Terms | None], None]) -> None:
        """Attach to whichever coordinator leads, and attach again, without end.

        pem: the worker's certificate now. attached: called with the terms, and with None when the coordinator is gone.
        """
        failed = 0
        for server in cycle(self._servers):
            try:
                while await self._attend(server, pem, attached):
                    pass  # with another certificate
                why = "the coordinator ended the call"
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            if self.terms is not None:
                self.terms, failed = None, 0
                attached(None)
            failed += 1
            wait_s = 0.0 if failed % len(self._servers) else RECONNECT_S
            if self._problems.get(server) != why:
                self._problems[server] = why
                log.warning("detached", server=server, reason=why, next_try_seconds=wait_s)
            await asyncio.sleep(wait_s)

    async def _attend(
        self, server: str, pem: Callable[[], Pem | None], attached: Callable[[Terms | None], None]
    ) -> bool:
        """Stay attached until the coordinator ends the call (False), or this worker's certificate is another (True)."""
        used = pem()
        self._connect(server, used)
        request = pb.ServeRequest(name=self._name, software=self._software)
        call = self._stream("Serve", pb.ServeRequest, pb.ServeResponse)(request)
        try:
            reading = asyncio.ensure_future(call.read())
            while pem() is used:
                if not (await asyncio.wait({reading}, timeout=CERTIFICATE_CHECK_S))[0]:
                    continue
                if (said := reading.result()) is grpc.aio.EOF:
                    return False
                self.terms = Terms(said.coordinator_id, said.objects, said.epoch)
                self._problems.clear()
                log.info("attached", server=server, coordinator=said.coordinator_id)
                attached(self.terms)
                reading = asyncio.ensure_future(call.read())
            return True
        finally:
            reading.cancel()
            call.cancel()

    def _connect(self, server: str, pem: Pem | None) -> None:
        """Open a connection. Calls in progress on the one before go on."""
        if (before := self._channel) is not None:
            closing = asyncio.create_task(before.close(LONGEST_CALL_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        options = [*dict(client_options()).items(), ("grpc.min_reconnect_backoff_ms", CONNECT_MS)]
        if pem is None:
            self._channel = grpc.aio.insecure_channel(server, options)
        else:
            credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
            self._channel = grpc.aio.secure_channel(server, credentials, options)

    async def close(self) -> None:
        """Close the connections. Calls in progress fail."""
        for closing in self._closing:
            closing.cancel()
        if self._channel is not None:
            await self._channel.close()

    def check(self) -> grpc.aio.Channel:
        """The connection. Raises NotNow while there is no coordinator."""
        if self.terms is None or self._channel is None:
            raise NotNow("this worker cannot reach the coordinator", AGAIN_S, routine=True)
        return self._channel

    def stream(self, method: str, request: type[Message], response: type[Message]) -> Any:
        """A call with streams in both directions. Raises NotNow."""
        self.check()
        assert self._channel is not None  # noqa: S101 - checked
        return self._channel.stream_stream(_PATH + method, request.SerializeToString, response.FromString)()

    def resource(self, request: pb.FetchResourceRequest) -> Any:
        """The messages of a resource. Raises NotNow."""
        self.check()
        return self._stream("FetchResource", pb.FetchResourceRequest, pb.FetchResourceResponse)(request)

    async def query(self, request: pb.QueryForClientRequest) -> pb.QueryForClientResponse:
        """See QueryForClient. Raises NotNow, Relayed."""
        call = self.check().unary_unary(
            _PATH + "QueryForClient", pb.QueryForClientRequest.SerializeToString, pb.QueryForClientResponse.FromString
        )
        try:
            answer: pb.QueryForClientResponse = await call(request)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        return answer

    def _stream(self, method: str, request: type[Message], response: type[Message]) -> Any:
        assert self._channel is not None  # noqa: S101 - after `_connect`
        return self._channel.unary_stream(_PATH + method, request.SerializeToString, response.FromString)


def caller_now() -> pb.Caller:
    """The client of the current call, as the coordinator is told."""
    who = caller.get()
    if who is ANYBODY:
        return pb.Caller(address=address.get())
    return pb.Caller(
        role=who.role,
        name=who.name,
        ends=who.ends or 0.0,
        begins=who.begins,
        serial=who.serial,
        key=who.key,
        address=address.get(),
    )


def error_of(error: grpc.aio.AioRpcError) -> ServerError:
    """The error for the client: the coordinator's own status for its call, or that it should come again.

    A status that is about the worker itself, or about its connection, says nothing about the client.
    """
    detail = detail_of(error.trailing_metadata())
    mine = isinstance(detail, errors_pb2.NotAllowed) and detail.identity != str(caller.get())
    if mine or (detail is None and error.code().name not in _OF_THE_COORDINATOR):
        log.warning("call_failed", code=error.code().name, reason=(error.details() or "")[:300])
        return NotNow("this worker cannot reach the coordinator", AGAIN_S, routine=True)
    return Relayed(error.code().value[0], error.details() or "", detail)
