"""A server on loopback that runs a test's methods with the interceptor, and a client for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from fl_server.audit.calls import Recorded
from fl_server.metrics import Metrics
from fl_server.rpc.call_limits import CallLimits
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from fl_server.rpc.methods import EVERYONE
from fl_server.rpc.methods import Method as Row
from tests.fl_server.harness import TIMEOUT_S

Method = Callable[..., Any]
_Method = Any
"""A method without serializers takes and returns bytes, which grpc's types cannot express."""
_MAKE = {
    "One": grpc.unary_unary_rpc_method_handler,
    "Up": grpc.stream_unary_rpc_method_handler,
    "Down": grpc.unary_stream_rpc_method_handler,
}
_ROWS = {
    "fl.v1.Coordinator": Row(frozenset({"client"})),
    "fl.v1.Admin": Row(frozenset({"admin"}), recorded=Recorded()),
    "grpc.health.v1.Health": Row(EVERYONE),
}
"""What holds for the methods of a service."""


def echo_policy(metrics: Metrics, limits: CallLimits | None = None, **settings: Any) -> CallPolicy:
    """A policy of a port with these methods, which trusts callers without a certificate."""
    methods = {f"/{service}/{name}": row for service, row in _ROWS.items() for name in _MAKE}
    return CallPolicy(metrics, limits or CallLimits(64, 1000), methods=methods, trusts_everybody=True, **settings)


class Caller:
    """Calls the methods with bytes, and returns bytes."""

    def __init__(self, channel: grpc.aio.Channel, service: str) -> None:
        self.channel, self._service = channel, service

    def one(self, request: bytes = b"") -> grpc.aio.UnaryUnaryCall[Any, bytes]:
        """One request, one response."""
        method: _Method = self.channel.unary_unary(f"/{self._service}/One")
        call: grpc.aio.UnaryUnaryCall[Any, bytes] = method(request, timeout=TIMEOUT_S)
        return call

    def up(self, *requests: bytes) -> grpc.aio.StreamUnaryCall[Any, bytes]:
        """A request stream, one response."""
        method: _Method = self.channel.stream_unary(f"/{self._service}/Up")
        call: grpc.aio.StreamUnaryCall[Any, bytes] = method(iter(requests), timeout=TIMEOUT_S)
        return call

    async def down(self, request: bytes = b"") -> list[bytes]:
        """One request, a response stream."""
        method: _Method = self.channel.unary_stream(f"/{self._service}/Down")
        return [each async for each in method(request, timeout=TIMEOUT_S)]


@dataclass(frozen=True)
class Credentials:
    """The TLS credentials of both ends of a connection."""

    server: grpc.ServerCredentials
    client: grpc.ChannelCredentials


@asynccontextmanager
async def calling(
    metrics: Metrics,
    service: str,
    credentials: Credentials | None = None,
    policy: CallPolicy | None = None,
    **methods: Method,
) -> AsyncIterator[Caller]:
    """A caller of a server with some of the methods One, Up and Down; without TLS if there are no credentials."""
    server = grpc.aio.server(interceptors=[CallInterceptor(policy or echo_policy(metrics))])
    handlers: dict[str, Any] = {name: _MAKE[name](method) for name, method in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    here = "127.0.0.1:0"
    port = server.add_secure_port(here, credentials.server) if credentials else server.add_insecure_port(here)
    await server.start()
    there = f"127.0.0.1:{port}"
    try:
        async with _channel(there, credentials) as channel:
            yield Caller(channel, service)
    finally:
        await server.stop(None)


def _channel(target: str, credentials: Credentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(target)
    return grpc.aio.secure_channel(target, credentials.client)
