"""A server on loopback, with the interceptor in front of methods that a test brings, and one who calls them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from fl_server.interceptors import CallInterceptor, CallPolicy
from fl_server.metrics import Metrics
from fl_server.rpc.callers import Callers

Method = Callable[..., Any]
_MAKE = {
    "One": grpc.unary_unary_rpc_method_handler,
    "Up": grpc.stream_unary_rpc_method_handler,
    "Down": grpc.unary_stream_rpc_method_handler,
}


class Caller:
    """Calls the methods, with bytes in and bytes out."""

    def __init__(self, channel: grpc.aio.Channel, service: str) -> None:
        self.channel, self._service = channel, service

    def one(self, request: bytes = b"") -> Awaitable[bytes]:
        """One message there, one back."""
        return self.channel.unary_unary(f"/{self._service}/One")(request, timeout=20)

    def up(self, *requests: bytes) -> Awaitable[bytes]:
        """Many there, one back."""
        return self.channel.stream_unary(f"/{self._service}/Up")(iter(requests), timeout=20)

    async def down(self, request: bytes = b"") -> list[bytes]:
        """One there, many back."""
        return [each async for each in self.channel.unary_stream(f"/{self._service}/Down")(request, timeout=20)]


@dataclass(frozen=True)
class Ends:
    """What both ends of a connection show."""

    server: grpc.ServerCredentials
    client: grpc.ChannelCredentials


@asynccontextmanager
async def calling(
    metrics: Metrics, service: str, ends: Ends | None = None, policy: CallPolicy | None = None, **methods: Method
) -> AsyncIterator[Caller]:
    """A caller of a server with the methods One, Up and Down, those that are given; plain text without `ends`."""
    server = grpc.aio.server(interceptors=[CallInterceptor(policy or CallPolicy(metrics, Callers(64, 1000)))])
    handlers = {name: _MAKE[name](method) for name, method in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    here = "127.0.0.1:0"
    port = server.add_secure_port(here, ends.server) if ends else server.add_insecure_port(here)
    await server.start()
    there = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.secure_channel(there, ends.client) if ends else grpc.aio.insecure_channel(there) as channel:
            yield Caller(channel, service)
    finally:
        await server.stop(None)
