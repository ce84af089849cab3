"""The Admin service on a real port with its interceptors, over a coordinator in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from fl_server.rpc.admin import AdminService
from fl_server.rpc.call_limits import CallLimits
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from protos.fl.v1 import admin_pb2_grpc
from protos.wire import client_options, server_options
from tests.fl_server.harness import World


@asynccontextmanager
async def admin_channel(world: World) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the admin port, without TLS."""
    policy = CallPolicy(
        world.services.metrics, CallLimits(64, 1000), "admin_listen", audit=world.services.audit, trusts_everybody=True
    )
    server = grpc.aio.server(interceptors=[CallInterceptor(policy)], options=server_options())
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(world.services, world.coordinator), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=list(client_options())) as channel:
        yield channel
    await server.stop(None)
