"""Calls of the Admin service over grpc.aio. Equal calls of several views at about the same time are made once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from fl_web.coordinator.errors import explained
from protos.fl.v1 import admin_pb2_grpc

CALL_S = 20.0
"""Timeout of a call that is no stream."""
SHARED_S = 0.8
"""A reply serves equal calls of views that are opened within this time."""
KEPT_S = 30.0
"""Longest time for which a reply is kept, for callers that know that nothing has changed."""
_MOST_SHARED = 128
"""Replies that are kept at most."""

Metadata = Sequence[tuple[str, str]] | Callable[[], Sequence[tuple[str, str]]]
"""What goes with every call; a function if it may change, as a token in a file does."""
Response = TypeVar("Response", bound=Message)


@dataclass(slots=True)
class _Reply:
    """A call under way or done."""

    task: asyncio.Task[Any]
    made: float
    """By the monotonic clock."""

    def serves(self, now: float, since: float | None) -> bool:
        """Whether it may stand for a call that is made now."""
        return (not self.task.done() or self.made >= now - SHARED_S) if since is None else self.made >= since


class Calls:
    """The methods of the Admin service, by name. Raises `WebError`, and AioRpcError for an unknown identity."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        # The generated stub has no types; `call` and `stream` add them.
        self._stub: Any = cast(Any, admin_pb2_grpc).AdminStub(channel)
        self._metadata = metadata if callable(metadata) else lambda: tuple(metadata)
        self._replies: dict[tuple[str, bytes], _Reply] = {}

    async def call(
        self, method: str, request: Message, response: type[Response], since: float | None = None
    ) -> Response:
        """Make a call, or wait for an equal one, or use its reply.

        since: the equal one must not have been made before, by the monotonic clock; None: one under way, or of the last
        SHARED_S.
        """
        key, now = (method, request.SerializeToString(deterministic=True)), time.monotonic()
        reply = self._replies.get(key)
        if reply is None or _failed(reply.task) or not reply.serves(now, since):
            self._drop_old(now)
            reply = self._replies[key] = _Reply(asyncio.create_task(self._made(method, request)), now)
        del response  # only for the type
        return cast(Response, await asyncio.shield(reply.task))

    async def stream(self, method: str, request: Message, response: type[Response]) -> AsyncGenerator[Response, None]:
        """The messages of a stream until the coordinator ends it."""
        del response  # only for the type
        stream = getattr(self._stub, method)(request, metadata=self._metadata())
        try:
            async for message in stream:
                yield message
        except grpc.aio.AioRpcError as error:
            raise explained(error) from error
        finally:
            stream.cancel()

    async def _made(self, method: str, request: Message) -> Message:
        try:
            reply: Message = await getattr(self._stub, method)(request, timeout=CALL_S, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise explained(error) from error
        return reply

    def _drop_old(self, now: float) -> None:
        old = [key for key, reply in self._replies.items() if reply.task.done() and now - reply.made > KEPT_S]
        for key in old:
            del self._replies[key]
        while len(self._replies) >= _MOST_SHARED:
            del self._replies[next(iter(self._replies))]


def _failed(task: asyncio.Task[Any]) -> bool:
    """Whether a call has failed. The failure is read here, so that asyncio does not log it as never retrieved."""
    return task.done() and (task.cancelled() or task.exception() is not None)
