"""A grpc server that goes on serving its port when the transport's accept loop ends.

grpc.aio reads the path of every call in the loop that accepts calls, as UTF-8. One call with another path ends that
loop: the server accepts no call any more, and nothing reports that (seen with grpcio 1.85). Here the loop is observed.
When it has ended, a new server takes the port within a fraction of a second, and calls in progress go on to their end
in the old one. Callers of new calls connect again, as after any cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import structlog

from fl_common.settings import SettingsError

log = structlog.get_logger()

CHECK_S = 0.1
"""Period of the checks."""
ENDING_S = 3600.0
"""Longest time for the calls in progress of a server whose loop has ended."""


class LastingServer(grpc.aio.Server):
    """Has the interface of a grpc.aio server with one port. Lives on the event loop."""

    def __init__(
        self, make: Callable[[], grpc.aio.Server], credentials: Callable[[], grpc.ServerCredentials] | None = None
    ) -> None:
        """make: makes a server without handlers and ports.

        credentials: makes those of one server, for credentials that read certificates anew serve one only; None: none.
        """
        self._make, self._credentials = make, credentials
        self._server = make()
        self._handlers: list[Callable[[grpc.aio.Server], None]] = []
        self._address = ""
        self._ending: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Do what grpc.aio.Server does."""
        handlers = tuple(generic_rpc_handlers)
        self._add(lambda server: server.add_generic_rpc_handlers(handlers))

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Nothing: generated code adds the same handlers as generic ones too, which the interceptor wraps."""

    def _add(self, change: Callable[[grpc.aio.Server], None]) -> None:
        self._handlers.append(change)
        change(self._server)

    def listen(self, address: str, setting: str) -> str:
        """Listen at an address, not started yet. Returns host:port.

        Raises SettingsError, which names the setting, for an address that cannot be used.
        """
        try:
            if self._credentials is None:
                self.add_insecure_port(address)
            else:
                self.add_secure_port(address, self._credentials())
        except RuntimeError as error:
            raise SettingsError(
                f"{setting}: cannot listen on {address}: the port is in use, or the address is not this machine's; "
                f"choose another, or port 0 for any free one"
            ) from error
        return self._address

    def add_insecure_port(self, address: str) -> int:
        """Do what grpc.aio.Server does."""
        return self._listens(address, self._server.add_insecure_port(address))

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Do what grpc.aio.Server does."""
        return self._listens(address, self._server.add_secure_port(address, server_credentials))

    def _listens(self, address: str, number: int) -> int:
        self._address = f"{address.rpartition(':')[0]}:{number}"
        return number

    async def start(self) -> None:
        """Serve until `stop`."""
        await self._server.start()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self, grace: float | None) -> None:
        """Do what grpc.aio.Server does."""
        if self._watching is not None:
            self._watching.cancel()
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._server.stop(grace)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - grpc fixes the name
        """Do what grpc.aio.Server does, for the present server."""
        return bool(await self._server.wait_for_termination(timeout))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if not _accepts(self._server):
                await self._replace()

    async def _replace(self) -> None:
        server = self._make()
        for add in self._handlers:
            add(server)
        try:
            if self._credentials is None:
                server.add_insecure_port(self._address)
            else:
                server.add_secure_port(self._address, self._credentials())
        except RuntimeError:  # the old server still holds it: at the next check
            return
        await server.start()
        self._server, old = server, self._server
        ending = asyncio.create_task(_end(old))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        log.error("port_served_again", listen=self._address, reason="a call with an invalid path ended the accept loop")


def _accepts(server: grpc.aio.Server) -> bool:
    """Whether its accept loop runs. grpc.aio has no public name for this."""
    inner: Any = server
    return bool(inner._server.is_running())  # noqa: SLF001 - see above


async def _end(server: grpc.aio.Server) -> None:
    """Free a server when its calls have ended."""
    with suppress(Exception):  # the error that ended its loop
        await server.stop(ENDING_S)
