"""A network in place of gRPC: calls reach another process as encoded messages, and may be lost, late or repeated.

The daemon's side is a channel with the calls of `grpc.aio`. The coordinator's side calls the product's own handlers
behind its interceptor, so that every error becomes the status that a real client gets.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import Context as Context_
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from tests.deterministic.lies import lying
from tests.deterministic.loop import CURRENT, Killed, Process

WINDOW = 4
"""Messages of a stream that are under way before its sender waits."""
GONE_S = 45.0
"""After this time the transport notices that the other side has vanished without a word."""

Handlers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Details:
    """What the interceptor reads of a call."""

    method: str


@dataclass(slots=True)
class Trouble:
    """What the network does to one call."""

    loses_request: bool = False
    """The call fails before the server has it."""
    loses_answer: bool = False
    """The server does the work, and the call fails."""
    repeats_after_s: float = 0.0
    """The server gets the call once more, after this time; nobody hears the second answer."""
    late_s: float = 0.0
    """The request takes this much longer."""
    cuts_after: int = -1
    """The call fails after so many messages of its stream."""


class Server:
    """The listening side of one process."""

    def __init__(self, process: Process, handlers: Handlers) -> None:
        self.process, self.handlers = process, handlers
        self.calls: set[Call] = set()
        process.on_kill.append(self._end)

    def _end(self) -> None:
        for call in list(self.calls):
            call.fail_later("the coordinator's process has ended")


class Network:
    """All links, and the one server."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.server: Server | None = None
        self.blocked: dict[str, float] = {}
        """Client -> virtual time until which nothing passes."""
        self.trouble: Callable[[str, str, int], Trouble | None] = lambda client, method, number: None
        """Called for each call with client, method and its number among the client's calls of the method."""
        self.lies: Callable[[str, int], str] = lambda client, number: ""
        """Called for each upload with client and its number; returns the kind of its lie."""
        self.answered: Callable[[str, Any], None] = lambda client, response: None
        """Called with each answer that the server sends."""
        self._numbers: dict[tuple[str, str], int] = {}
        self._draws: dict[str, random.Random] = {}
        self.calls: set[Call] = set()

    def latency(self, client: str) -> float:
        """Seconds that a message takes."""
        if client not in self._draws:
            self._draws[client] = random.Random(f"latency {self._seed} {client}")
        draw = self._draws[client]
        return draw.uniform(0.001, 0.05) if draw.random() < 0.9 else draw.uniform(0.05, 1.5)

    def number(self, client: str, method: str) -> int:
        """The number of a new call, from 0."""
        count = self._numbers.get((client, method), 0)
        self._numbers[client, method] = count + 1
        return count

    def is_blocked(self, client: str) -> bool:
        """Whether the client's link is cut now."""
        return self.blocked.get(client, -1.0) > asyncio.get_running_loop().time()

    def block(self, client: str, seconds: float) -> None:
        """Cut a client's link for a while: calls under way fail, new ones find nobody."""
        self.blocked[client] = asyncio.get_running_loop().time() + seconds
        for call in list(self.calls):
            if call.client == client:
                call.fail_later("the link was cut")
                call.hang_up()


class Call:
    """One call on both sides."""

    def __init__(self, network: Network, channel: Channel, method: str) -> None:
        self.network, self.channel, self.method, self.client = network, channel, method, channel.client
        name = method.rpartition("/")[2]
        self.number = network.number(self.client, name)
        """Among the client's calls of the method, from 0."""
        self.trouble = network.trouble(self.client, name, self.number) or Trouble()
        loop = asyncio.get_running_loop()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        """Messages for the client; then EOF or an error."""
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.room = asyncio.Semaphore(WINDOW)
        self.up_room = asyncio.Semaphore(WINDOW)
        self.server: Server | None = None
        self.handler: asyncio.Task[Any] | None = None
        self.over = False
        self._loop = loop
        self._last = {"up": 0.0, "down": 0.0}
        self._seen = 0
        network.calls.add(self)
        channel.calls.add(self)

    # What passes.

    def later(self, way: str, deliver: Callable[..., Any], *args: Any, extra: float = 0.0) -> None:
        """Deliver something after the latency, in order of the direction."""
        when = max(self._last[way] + 1e-6, self._loop.time() + self.network.latency(self.client) + extra)
        self._last[way] = when
        self._loop.call_at(when, deliver, *args, context=_nobody())

    def request(self, message: Any) -> None:
        """The client sends a message, or EOF."""
        _require_alive()
        self.later("up", self.requests.put_nowait, message)

    def answer(self, message: Any) -> None:
        """The server sends a message."""
        _require_alive()
        if not self.over:
            self.later("down", self._arrive, message)

    def _arrive(self, message: Any) -> None:
        if self.over:
            return
        self._seen += 1
        if 0 <= self.trouble.cuts_after < self._seen:
            self.fail("the stream was cut")
            self.hang_up()
            return
        self.answers.put_nowait(message)

    # Its ends.

    def fail_later(self, why: str) -> None:
        """The client hears that the call has failed."""
        self.later("down", self.fail, why)

    def fail(self, why: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, trailing: Any = ()) -> None:
        """The call has failed at the client."""
        if not self.over:
            self.over = True
            self.answers.put_nowait(error(code, why, trailing))
            self._forget()

    def finish(self) -> None:
        """The last answer was delivered."""
        if not self.over:
            self.over = True
            self.answers.put_nowait(grpc.aio.EOF)
            self._forget()

    def hang_up(self) -> None:
        """The server hears that the client has gone."""
        self.later("up", self._cancel_handler)

    def cancel(self) -> None:
        """The client ends the call."""
        if not self.over:
            self.over = True
            self.answers.put_nowait(asyncio.CancelledError())
            self._forget()
            self.hang_up()

    def _cancel_handler(self) -> None:
        self.requests.put_nowait(None)
        if self.handler is not None and self.server is not None and self.server.process.alive:
            self.handler.cancel()

    def _forget(self) -> None:
        self.network.calls.discard(self)
        self.channel.calls.discard(self)

    # The server's side.

    def begin(self) -> None:
        """Open the call at the server."""
        if self.trouble.loses_request or self.network.is_blocked(self.client) or self.network.server is None:
            self.fail_later("failed to connect: Connection refused")
            return
        self.later("up", self._serve, extra=self.trouble.late_s)
        if self.trouble.repeats_after_s:
            self._loop.call_later(self.trouble.repeats_after_s, self._repeat, context=_nobody())

    def _serve(self) -> None:
        server = self.network.server
        if server is None or not server.process.alive or self.over:
            self.fail_later("failed to connect: Connection refused")
            return
        self.server = server
        server.calls.add(self)
        self.handler = server.process.spawn(_handle(self, server))

    def _repeat(self) -> None:
        server = self.network.server
        if server is None or not server.process.alive or self.sent is None:
            return
        ghost = Call(self.network, Channel(self.network, self.client, self.channel.process), self.method)
        ghost.trouble = Trouble()
        for message in self.sent:
            ghost.requests.put_nowait(message)
        ghost.requests.put_nowait(grpc.aio.EOF)
        ghost.server = server
        server.calls.add(ghost)
        ghost.handler = server.process.spawn(_handle(ghost, server))

    sent: list[Any] | None = None
    """The messages of the request so far."""


class Context:
    """The server's context of a call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def peer(self) -> str:
        return f"ipv4:10.0.0.1:{1024 + self._call.channel.number}"

    def auth_context(self) -> dict[str, Any]:
        return {}

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    async def read(self) -> Any:
        message = await self._call.requests.get()
        if message is None:
            raise asyncio.CancelledError
        return message

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        if self._call.server is not None and self._call.server.process.alive:
            self._call.later("down", self._call.fail, details, code, tuple(trailing_metadata))
        raise grpc.aio.AbortError


async def _requests(call: Call, deserialize: Callable[[bytes], Any] | None) -> AsyncIterator[Any]:
    """The messages of a call's request, as its handler gets them."""
    while True:
        message = await call.requests.get()
        call.up_room.release()
        if message is None:
            raise asyncio.CancelledError
        if message is grpc.aio.EOF:
            return
        yield message if deserialize is None else deserialize(message)


async def _respond(call: Call, server: Server) -> None:
    """Run the product's handler for a call, and send what it answers."""
    handler, context = server.handlers[call.method], Context(call)
    requests = _requests(call, handler.request_deserializer)
    serialize = handler.response_serializer or (lambda message: message)
    if handler.response_streaming:
        async for response in handler.stream_stream(requests, context):
            await call.room.acquire()
            call.answer(serialize(response))
    else:
        answer = await handler.stream_unary(requests, context)
        call.network.answered(call.client, answer)
        if call.trouble.loses_answer:
            call.fail_later("the connection was lost")
            return
        call.answer(serialize(answer))
    call.later("down", call.finish)


async def _handle(call: Call, server: Server) -> None:
    """Serve a call. An error of it reaches the client as grpc would send it."""
    try:
        await _respond(call, server)
    except grpc.aio.AbortError:
        pass
    except asyncio.CancelledError:
        call.fail_later("the server cancelled the call")
        raise
    except Exception as failure:  # noqa: BLE001 - as grpc does for an error of a deserializer
        call.later("down", call.fail, repr(failure), grpc.StatusCode.UNKNOWN)
    finally:
        server.calls.discard(call)


class Channel:
    """The client's connection: the part of `grpc.aio.Channel` that the daemon uses."""

    _count = 0

    def __init__(self, network: Network, client: str, process: Process) -> None:
        Channel._count += 1
        self.number = Channel._count % 60000
        self.network, self.client, self.process = network, client, process
        self.calls: set[Call] = set()
        self.closed = False
        process.on_kill.append(self._vanish)

    def _vanish(self) -> None:
        for call in list(self.calls):
            call.over = True
            self.network.calls.discard(call)
            call.hang_up()
        self.calls.clear()

    def unary_unary(self, method: str, serialize: Any, _: Any) -> Callable[..., Awaitable[bytes]]:
        async def call(request: Any, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - as in grpc.aio
            made = self._call(method)
            made.sent = [serialize(request)]
            made.begin()
            made.request(made.sent[0])
            made.request(grpc.aio.EOF)
            if timeout is None:
                return await _single(made)
            try:
                async with asyncio.timeout(timeout):
                    return await _single(made)
            except TimeoutError:
                made.cancel()
                raise error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

        return call

    def unary_stream(self, method: str, serialize: Any, _: Any) -> Callable[[Any], ClientStream]:
        def call(request: Any) -> ClientStream:
            made = self._call(method)
            made.sent = [serialize(request)]
            made.begin()
            made.request(made.sent[0])
            made.request(grpc.aio.EOF)
            return ClientStream(made)

        return call

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None
    ) -> Callable[[AsyncIterator[bytes]], Awaitable[bytes]]:
        async def call(parts: AsyncIterator[bytes]) -> bytes:
            made = self._call(method)
            made.sent = []
            if kind := self.network.lies(self.client, made.number):
                parts = lying(kind, parts)
            made.begin()
            sending = asyncio.ensure_future(_send(made, parts))
            try:
                return await _single(made)
            finally:
                sending.cancel()

        return call

    def _call(self, method: str) -> Call:
        if self.closed:
            raise grpc.aio.UsageError("Channel is closed.")
        return Call(self.network, self, method)

    async def close(self) -> None:
        self.closed = True
        for call in list(self.calls):
            call.cancel()


async def _send(call: Call, parts: AsyncIterator[bytes]) -> None:
    count = 0
    async for part in parts:
        await call.up_room.acquire()
        count += 1
        if 0 <= call.trouble.cuts_after < count:
            call.fail("the stream was cut")
            call.hang_up()
            return
        assert call.sent is not None
        call.sent.append(part)
        call.request(part)
    call.request(grpc.aio.EOF)


async def _single(call: Call) -> bytes:
    try:
        message = await call.answers.get()
    except asyncio.CancelledError:
        call.cancel()
        raise
    if isinstance(message, BaseException):
        raise message
    end = await call.answers.get()
    if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
        raise end
    answer: bytes = message
    return answer


class ClientStream:
    """A stream of answers, read one by one."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def read(self) -> Any:
        message = await self._call.answers.get()
        if isinstance(message, BaseException):
            self._call.answers.put_nowait(message)
            raise message
        if message is grpc.aio.EOF:
            self._call.answers.put_nowait(message)
            return message
        self._call.room.release()
        return message

    def cancel(self) -> None:
        self._call.cancel()


def error(code: grpc.StatusCode, why: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    """The error of a failed call."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=why)


def _require_alive() -> None:
    """Nothing is sent by a process that is dead, whatever its stack does while it is unwound."""
    process = CURRENT.get()
    if process is not None and not process.alive:
        raise Killed


def _nobody() -> Any:
    """The context of the network, which belongs to no process."""
    return NOBODY


NOBODY = Context_()
