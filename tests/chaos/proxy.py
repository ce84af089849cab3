"""A TCP proxy between a daemon and its coordinator, in a thread of the test, that injects network faults."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from tests.chaos.proxied_connection import Connection
from tests.chaos.proxy_log import ProxyLog, Upload
from tests.chaos.traps import Action, Damage, Direction, Stop, Trap, Traps, Where
from tests.processes.process import TIMEOUT_S

Target = str | Callable[[], tuple[str, int]]
T = TypeVar("T")
LARGE = 4096
"""A message of at least this many bytes is a chunk of an update or a model; all others are shorter."""


class Proxy:
    """Forwards all bytes by default; a context manager. Any thread may call it."""

    def __init__(self, target: Target, large: int = LARGE) -> None:
        self._target, self._large = target, large
        # This socket reserves the port while the proxy does not listen.
        self._keeper = _bound(0)
        self._port = int(self._keeper.getsockname()[1])
        self._traps = Traps()
        self._open: dict[Connection, asyncio.Task[None]] = {}
        self._log = ProxyLog()
        self._listener: socket.socket | None = None
        self.absences = 0
        """How often the proxy stopped listening."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self._port}", daemon=True)
        self._thread.start()
        self.back()

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self._port}"

    @property
    def cuts(self) -> int:
        """Connections that a trap has cut."""
        return sum(isinstance(trap, Stop) and trap.action != "hold" for trap in self._traps.triggered)

    @property
    def held(self) -> int:
        """Connections that a trap has held."""
        return sum(isinstance(trap, Stop) and trap.action == "hold" for trap in self._traps.triggered)

    @property
    def corrupted(self) -> int:
        """Messages that passed damaged."""
        return sum(isinstance(trap, Damage) for trap in self._traps.triggered)

    def chunks(self, direction: Direction) -> list[int]:
        """Size in bytes of each large message that passed completely, in order."""
        return list(self._log.chunks[direction])

    def uploads(self) -> list[Upload]:
        """The latest uploads that passed completely, the oldest first."""
        return list(self._log.uploads)

    @property
    def session_id(self) -> str:
        """Id of the last attended session; empty if there was none."""
        return self._log.session_id

    def cut(self, direction: Direction, message: int = 1, where: Where = "before", action: Action = "reset") -> Stop:
        """Cut the connection at the `message`th chunk of the next stream that reaches it; later streams pass.

        With `action` "hold" nothing more passes in this direction until `pass_on`.
        """
        trap = Stop(direction, message, where, action)
        self._do(self._set(trap))
        return trap

    def corrupt(self, direction: Direction, message: int = 1, *, sealed: bool = False) -> Damage:
        """Flip one bit in the data of such a chunk, once; `sealed`: also correct its crc32c."""
        trap = Damage(direction, message, sealed)
        self._do(self._set(trap))
        return trap

    def drop(self) -> int:
        """Reset every open connection and return their number; new connections pass."""
        return self._do(self._drop())

    def away(self) -> None:
        """Stop listening and reset every connection."""
        self._do(self._leave())
        self.absences += 1

    def back(self) -> None:
        """Listen again, on the same port."""
        self._do(self._listen())

    def pass_on(self) -> None:
        """Remove all traps, release held connections, and listen."""
        self._do(self._heal())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Reset every connection and end the thread."""
        self._do(self._leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()
        self._keeper.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    async def _set(self, trap: Trap) -> None:
        self._traps.waiting.append(trap)

    async def _drop(self) -> int:
        ending = dict(self._open)
        for connection in ending:
            connection.end("reset")
        await asyncio.gather(*ending.values())
        return len(ending)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bound(self._port)
            self._listener.listen()
            self._loop.add_reader(self._listener, self._accept, self._listener)

    async def _leave(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await self._drop()

    async def _heal(self) -> None:
        self._traps.waiting.clear()
        for connection in self._open:
            connection.passing.set()
        await self._listen()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            connection = Connection(listener.accept()[0], self._traps, self._log, self._large)
            self._open[connection] = self._loop.create_task(self._run(connection))

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.run(self._where())
        finally:
            del self._open[connection]

    def _where(self) -> tuple[str, int]:
        if callable(self._target):
            return self._target()
        host, _, port = self._target.rpartition(":")
        return host, int(port)


def _bound(port: int) -> socket.socket:
    """A socket bound to the port, which it shares with our other sockets that do not listen."""
    made = socket.socket()
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    return made
