"""A network in place of gRPC: calls reach another process as encoded messages, and may be lost, late or repeated.

`channel.py` has the daemon's side, `serving.py` the coordinator's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import Context as Context_
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.deterministic.loop import CURRENT, Killed, Process
from tests.deterministic.serving import handle

if TYPE_CHECKING:
    from tests.deterministic.channel import Channel

WINDOW = 4
"""Messages of a stream that are under way before its sender waits."""

Handlers = dict[str, Any]


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
        self.calls: dict[Call, None] = {}
        process.on_kill.append(self._end)

    def _end(self) -> None:
        for call in list(self.calls):
            call.fail_later("the coordinator's process has ended")


class Network:
    """All links, and the one server."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.server: Server | None = None
        self.channels = 0
        """The number of channels that clients have opened."""
        self.blocked: dict[str, float] = {}
        """Client -> virtual time until which nothing passes."""
        self.trouble: Callable[[str, str, int], Trouble | None] = lambda client, method, number: None
        """Called for each call with client, method and its number among the client's calls of the method."""
        self.lies: Callable[[str, int], str] = lambda client, number: ""
        """Called for each upload with client and its number; returns the kind of its lie."""
        self.lied: set[bytes] = set()
        """Digests of updates that no client has made."""
        self.answered: Callable[[str, Any], None] = lambda client, response: None
        """Called with each answer that the server sends."""
        self.sends: Callable[[str, str, bytes], None] = lambda client, method, message: None
        """Called with each message that a client sends, and the method's name."""
        self.pushed: Callable[[str, Any], None] = lambda client, response: None
        """Called with each message of a stream that the server sends."""
        self._numbers: dict[tuple[str, str], int] = {}
        self._draws: dict[str, random.Random] = {}
        self.calls: dict[Call, None] = {}

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
        network.calls[self] = None
        channel.calls[self] = None

    # What passes.

    def later(self, way: str, deliver: Callable[..., Any], *args: Any, extra: float = 0.0) -> None:
        """Deliver something after the latency, in order of the direction."""
        when = max(self._last[way] + 1e-6, self._loop.time() + self.network.latency(self.client) + extra)
        self._last[way] = when
        self._loop.call_at(when, deliver, *args, context=_nobody())

    def request(self, message: Any) -> None:
        """The client sends a message, or EOF."""
        _require_alive()
        if isinstance(message, bytes):
            self.network.sends(self.client, self.method.rpartition("/")[2], message)
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
        self.network.calls.pop(self, None)
        self.channel.calls.pop(self, None)

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
        server.calls[self] = None
        self.handler = server.process.spawn(handle(self, server))

    def _repeat(self) -> None:
        server = self.network.server
        if server is None or not server.process.alive or self.sent is None:
            return
        ghost = Call(self.network, self.channel.twin(), self.method)
        ghost.trouble = Trouble()
        for message in self.sent:
            ghost.requests.put_nowait(message)
        ghost.requests.put_nowait(grpc.aio.EOF)
        ghost.server = server
        server.calls[ghost] = None
        ghost.handler = server.process.spawn(handle(ghost, server))

    sent: list[Any] | None = None
    """The messages of the request so far."""


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
