"""A worker's connection to the coordinator: its presence, the calls that it makes for clients, and one call a transfer.

In the call of a transfer reports go up, and its end ends the transfer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any, Self, TypeVar

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
from protos.wire import client_options, filled

log = structlog.get_logger()
T = TypeVar("T")
Attached = Callable[[pb.ServeResponse | None], None]
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
FINISH_S = 1.0
"""Longest wait for the coordinator's end of a call."""
REPORT_S = 1.0
"""A report is sent after this time, also of few bytes."""


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
        self.terms: pb.ServeResponse | None = None
        """What the coordinator said to which this worker is attached; None while there is none."""

    async def keep_attached(self, pem: Callable[[], Pem | None], attached: Attached) -> None:
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

    async def _attend(self, server: str, pem: Callable[[], Pem | None], attached: Attached) -> bool:
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
                if (terms := reading.result()) is grpc.aio.EOF:
                    return False
                self.terms = terms
                self._problems.clear()
                log.info("attached", server=server, coordinator=terms.coordinator_id)
                attached(terms)
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
            raise _unreachable()
        return self._channel

    def stream(self, method: str, request: type[Message], response: type[Message]) -> Any:
        """A call with streams in both directions. Raises NotNow."""
        return self.check().stream_stream(_PATH + method, request.SerializeToString, response.FromString)()

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
    return filled(pb.Caller, who, ends=who.ends or 0.0, address=address.get())


def error_of(error: grpc.aio.AioRpcError) -> ServerError:
    """The error for the client: the coordinator's own status for its call, or that it should come again.

    A status that is about the worker itself, or about its connection, says nothing about the client.
    """
    detail = detail_of(error.trailing_metadata())
    mine = isinstance(detail, errors_pb2.NotAllowed) and detail.identity != str(caller.get())
    if mine or (detail is None and error.code().name not in _OF_THE_COORDINATOR):
        log.warning("call_failed", code=error.code().name, reason=(error.details() or "")[:300])
        return _unreachable()
    return Relayed(error.code(), error.details() or "", detail)


class EarlyAnswer(Exception):
    """The coordinator has ended the transfer, or decided about it, before its end: `answer` says which."""


class CoordinatedTransfer:
    """One call: `async with`. Lives on the event loop."""

    def __init__(self, call: Any, report: Callable[[int], Message]) -> None:
        """report: the message with the bytes that were moved since the last one."""
        self._call, self._report = call, report
        self._most, self._moved, self._reported_at = 1, 0, time.monotonic()
        self._untaken = False
        """Whether the coordinator has not taken the last report yet."""
        self._answers: deque[Any] = deque()
        """What has come and was not asked for yet; an error is the last one."""
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def finish(self) -> None:
        """Let the coordinator end the call, which is decided or complete. `close` ends it otherwise."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=FINISH_S)

    async def close(self) -> None:
        """End the call."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def begin(self, report_bytes: int) -> None:
        """The coordinator agrees. report_bytes: of a report, at the most."""
        self._most = max(1, report_bytes)

    async def _read(self) -> None:
        try:
            while True:
                answer = await self._call.read()
                if answer is grpc.aio.EOF:
                    self._answers.append(await self._end())
                    return
                if answer.HasField("taken"):
                    self._untaken = False
                else:
                    self._answers.append(answer)
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            self._answers.append(error_of(error))
        except asyncio.CancelledError:
            self._answers.append(_unreachable())
            raise
        finally:
            self._changed.set()

    async def _end(self) -> ServerError:
        """Why the coordinator has ended the call."""
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return NotNow("the coordinator ended the transfer", AGAIN_S, routine=True)
        begun, metadata = await self._call.initial_metadata(), await self._call.trailing_metadata()
        return error_of(grpc.aio.AioRpcError(code, begun, metadata, await self._call.details()))

    async def answer(self) -> Any:
        """The coordinator's next answer that is not about a report. Raises the error that ended the call."""
        while not self._answers:
            await self._change()
        answer = self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return self._answers.popleft()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def check(self) -> None:
        """Raises EarlyAnswer if the transfer is over."""
        if self._answers:
            raise EarlyAnswer

    async def send(self, message: Message) -> None:
        """Send a message. Raises EarlyAnswer if the call has ended."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            while not self._answers:  # `_read` finds out why
                await self._change()
            raise EarlyAnswer from error

    async def moved(self, count: int, *, now: bool = False) -> None:
        """So many bytes more. Reports them when they are many, or late; now: at once. Raises EarlyAnswer.

        Waits until the coordinator has taken the report before, which is how it slows a client down.
        """
        self._moved += count
        late = time.monotonic() >= self._reported_at + REPORT_S
        if not self._moved or not (now or late or self._moved >= self._most):
            return
        while self._untaken:
            self.check()
            await self._change()
        moved, self._moved, self._reported_at, self._untaken = self._moved, 0, time.monotonic(), True
        await self.send(self._report(moved))

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that may wait long for the client. Raises EarlyAnswer as soon as the transfer is over."""
        working, over = asyncio.create_task(work), asyncio.create_task(self._over())
        try:
            await asyncio.wait({working, over}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise EarlyAnswer
        finally:
            working.cancel()
            over.cancel()
            await asyncio.gather(working, over, return_exceptions=True)

    async def _over(self) -> None:
        while not self._answers:
            await self._change()


def _unreachable() -> ServerError:
    return NotNow("this worker cannot reach the coordinator", AGAIN_S, routine=True)
