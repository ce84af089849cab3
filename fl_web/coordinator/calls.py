"""Calls of the Admin service over grpc.aio, and their failures as the web page shows them.

Equal calls of several views at about the same time are made once.

WebError
├── Unreachable    the coordinator does not answer; it is tried again
├── NotFound       no such run, client, round or page
├── NotAllowed     the roles of the caller do not allow it
├── WrongInput     the coordinator refuses a value of the address
└── Failed         every other failure
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import Message

from fl_common.waiting import shielded
from protos.fl.v1 import admin_pb2_grpc


class WebError(Exception):
    """A view cannot be shown. status: of HTTP; title: what happened, in a few words."""

    status = 500
    title = "The view cannot be shown"


class Unreachable(WebError):
    """The coordinator does not answer."""

    status = 503
    title = "The coordinator does not answer"


class NotFound(WebError):
    """There is no such run, client, round or page."""

    status = 404
    title = "Not found"


class NotAllowed(WebError):
    """The roles of the caller do not allow the call."""

    status = 403
    title = "Not allowed"


class WrongInput(WebError):
    """The coordinator refuses a value."""

    status = 400
    title = "A value in the address is not valid"


class Failed(WebError):
    """Every other failure of a call."""

    status = 502
    title = "The coordinator cannot answer"


_KINDS: Mapping[grpc.StatusCode, type[WebError]] = {
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unreachable,
    grpc.StatusCode.CANCELLED: Unreachable,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.INVALID_ARGUMENT: WrongInput,
}


def login_needed(error: Exception) -> bool:
    """Whether a call failed because the coordinator does not know the identity any more."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED


_REFUSED = re.compile(r"(?:ipv[46]|unix):(?P<address>[^\s]+?): .*(?:Connection refused|No such file)")
_CUT = ("Socket closed", "Connection reset", "Broken pipe", "Stream removed", "GOAWAY")


def _plain(details: str) -> str:
    """The reason of a lost connection for a person: gRPC's own texts are about its parts."""
    if refused := _REFUSED.search(details):
        return f"nothing listens at {unquote(refused['address'])}"
    if any(sign in details for sign in _CUT):
        return "the connection was closed"
    return details


def explained(error: grpc.aio.AioRpcError) -> Exception:
    """The error to raise for a failed call. An unknown identity stays as it is: access control asks for a login."""
    if login_needed(error):
        return error
    text = error.details() or error.code().name.lower().replace("_", " ")
    kind = _KINDS.get(error.code(), Failed)
    return kind(_plain(text) if kind is Unreachable else text)


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
    """When it was made, by the monotonic clock."""

    def serves(self, now: float, since: float | None) -> bool:
        """Whether it may stand for a call that is made now."""
        return (not self.task.done() or self.made >= now - SHARED_S) if since is None else self.made >= since


class Calls:
    """The methods of the Admin service. Raises `WebError`, and AioRpcError for an unknown identity."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        # The generated stub has no types; `call` and `stream` add them.
        self._stub: Any = cast(Any, admin_pb2_grpc).AdminStub(channel)
        self._metadata = metadata if callable(metadata) else lambda: tuple(metadata)
        self._replies: dict[tuple[str, bytes], _Reply] = {}

    async def call(self, request: Message, response: type[Response], since: float | None = None) -> Response:
        """Make a call, or wait for an equal one, or use its reply.

        request: its name is that of the method: PauseRun for a PauseRunRequest. since: the equal one must not have been
        made before, by the monotonic clock; None: one under way, or of the last SHARED_S.
        """
        key, now = (request.DESCRIPTOR.name, request.SerializeToString(deterministic=True)), time.monotonic()
        reply = self._replies.get(key)
        if reply is None or has_failed(reply.task) or not reply.serves(now, since):
            self._drop_old(now)
            reply = self._replies[key] = _Reply(asyncio.create_task(self._made(request)), now)
        del response  # only for the type
        return cast(Response, await shielded(reply.task))

    async def stream(self, request: Message, response: type[Response]) -> AsyncGenerator[Response, None]:
        """The messages of a stream until the coordinator ends it."""
        del response  # only for the type
        stream = self._method(request)(request, metadata=self._metadata())
        try:
            async for message in stream:
                yield message
        except grpc.aio.AioRpcError as error:
            raise explained(error) from error
        finally:
            stream.cancel()

    def _method(self, request: Message) -> Any:
        return getattr(self._stub, request.DESCRIPTOR.name.removesuffix("Request"))

    async def _made(self, request: Message) -> Message:
        try:
            reply: Message = await self._method(request)(request, timeout=CALL_S, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise explained(error) from error
        return reply

    def _drop_old(self, now: float) -> None:
        old = [key for key, reply in self._replies.items() if reply.task.done() and now - reply.made > KEPT_S]
        for key in old:
            del self._replies[key]
        while len(self._replies) >= _MOST_SHARED:
            del self._replies[next(iter(self._replies))]


def has_failed(task: asyncio.Task[Any]) -> bool:
    """Whether a task has failed. The failure is read here, so that asyncio does not log it as never retrieved."""
    return task.done() and (task.cancelled() or task.exception() is not None)
