"""The daemon's side of the simulated network: a channel with the calls of `grpc.aio`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tests.deterministic.lies import lying
from tests.deterministic.loop import Process
from tests.deterministic.network import Call, Network, error


class Channel:
    """The client's connection: the part of `grpc.aio.Channel` that the daemon uses."""

    def __init__(self, network: Network, client: str, process: Process) -> None:
        network.channels += 1
        self.number = network.channels % 60000
        self.network, self.client, self.process = network, client, process
        self.calls: dict[Call, None] = {}
        self.closed = False
        process.on_kill.append(self._vanish)

    def _vanish(self) -> None:
        for call in list(self.calls):
            call.over = True
            self.network.calls.pop(call, None)
            call.hang_up()
        self.calls.clear()

    def twin(self) -> Channel:
        """Another connection of the same client."""
        return Channel(self.network, self.client, self.process)

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
                parts = lying(kind, parts, self.network.lied)
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
