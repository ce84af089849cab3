"""The coordinator's side of the simulated network: the product's handlers and what they see of a call.

They run behind the product's interceptor, so that every error becomes the status that a real client gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

if TYPE_CHECKING:
    from tests.deterministic.network import Call, Server


@dataclass(frozen=True, slots=True)
class Details:
    """What the interceptor reads of a call."""

    method: str


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
            call.network.pushed(call.client, response)
            call.answer(serialize(response))
    else:
        answer = await handler.stream_unary(requests, context)
        call.network.answered(call.client, answer)
        if call.trouble.loses_answer:
            call.fail_later("the connection was lost")
            return
        call.answer(serialize(answer))
    call.later("down", call.finish)


async def handle(call: Call, server: Server) -> None:
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
        server.calls.pop(call, None)
