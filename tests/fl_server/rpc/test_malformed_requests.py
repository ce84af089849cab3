"""Bytes that are no message: each method of each service answers INVALID_ARGUMENT, and the log has one line."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection
from structlog.testing import capture_logs

from fl_server.enrollment.calls import CertificatesService
from fl_server.rpc import service
from fl_server.rpc.admin import AdminService
from fl_server.rpc.call_limits import NESTED, CallLimits
from fl_server.rpc.health import Health
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from fl_server.rpc.workers import WorkersService
from fl_server.web.page import WebLoginService
from protos.fl.v1 import admin_pb2_grpc, enrollment_pb2_grpc, web_pb2_grpc, worker_pb2_grpc
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import Device
from tests.fl_server.harness import TIMEOUT_S, World

MALFORMED = (b"\xff" * 8, b"\x0a\x7f", b"\x0b" * 9, b"\x08" + b"\xff" * 11)
"""An unknown wire type, a truncated field, a group without an end, a number that is too long."""
NO_UTF8 = b"\x0a\x02\xff\xfe"
"""A first field that is no text."""
NO_ROLE = ("/grpc.health", "/grpc.reflection", "/fl.v1.Enrollment", "/fl.v1.WebLogin")
"""Anyone may call these, so their refusals are not logged."""


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What Python's own logging gets, of which grpc's is a part."""
    handler = BufferingHandler(1000)
    logging.getLogger().addHandler(handler)
    yield handler.buffer
    logging.getLogger().removeHandler(handler)


@asynccontextmanager
async def serving(world: World) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to one port with all services."""
    policy = CallPolicy(world.services.metrics, CallLimits(64, 1000), trusts_everybody=True)
    server = grpc.aio.server(interceptors=[CallInterceptor(policy)])
    server.add_generic_rpc_handlers((service.handlers(world.service),))
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(world.services, world.coordinator), server)
    workers = WorkersService(world.services, world.coordinator, world.uploads)
    worker_pb2_grpc.add_WorkersServicer_to_server(workers, server)
    enrollment = enrollment_pb2_grpc.EnrollmentServicer
    certificates = CertificatesService(None, world.services.metrics, world.services.audit)
    enrollment_pb2_grpc.add_CertificatesServicer_to_server(certificates, server)
    enrollment_pb2_grpc.add_EnrollmentServicer_to_server(enrollment(), server)
    logins = WebLoginService(world.services.web, None, world.services.audit)
    web_pb2_grpc.add_WebLoginServicer_to_server(logins, server)
    Health(()).serve_on(server)
    reflection.enable_server_reflection((service.SERVICE,), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def status_of(channel: grpc.aio.Channel, method: str, messages: Sequence[bytes]) -> tuple[str, str]:
    """Code and text of a call with these messages. On the wire, every kind of call is a stream of streams."""

    async def requests() -> AsyncIterator[Any]:
        for message in messages:
            yield message

    call: Any = channel.stream_stream(method)(requests(), timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code().name, caught.value.details() or ""


async def check_refused(channel: grpc.aio.Channel, method: str, message: bytes) -> None:
    """One call with this message is refused; the log has at most one line and no traceback."""
    with capture_logs() as logs:
        code, text = await status_of(channel, method, [message])
    assert (code, method) == ("INVALID_ARGUMENT", method)
    assert text.startswith(f"request: expected a request as {method.rpartition('/')[2]} in fl/v1/*.proto has it")
    assert [line["event"] for line in logs] == ([] if method.startswith(NO_ROLE) else ["rpc_refused"])
    assert not any("exc_info" in line or "\n" in str(line) for line in logs)


async def test_malformed_bytes_are_refused_in_every_method(tmp_path: Path, records: list[logging.LogRecord]) -> None:
    """Coordinator, Admin, Workers, Health and reflection; grpc itself logs nothing."""
    async with World(tmp_path) as world, serving(world) as channel:
        for method in NESTED:
            for message in MALFORMED:
                await check_refused(channel, method, message)
        for method in ("Coordinator/Attend", "Coordinator/QueryUpload", "Admin/GetRun", "Admin/WatchRun"):
            await check_refused(channel, f"/fl.v1.{method}", NO_UTF8)
    assert records == []


async def test_malformed_bytes_within_an_upload_are_refused(tmp_path: Path, records: list[logging.LogRecord]) -> None:
    """The message behind a good header: the same code, and one line."""
    async with World(tmp_path) as world, serving(world) as channel:
        device = await Device("a", works=False).connect(world)
        await world.create(round={"clients_per_round": 1})
        header, _ = await device.update(world, await device.assigned())
        header.session_id = device.session
        first = pb.SubmitUpdateRequest(header=header).SerializeToString()
        for message in MALFORMED:
            with capture_logs() as logs:
                code, _ = await status_of(channel, "/fl.v1.Coordinator/SubmitUpdate", [first, message])
            assert code == "INVALID_ARGUMENT"
            assert [line["event"] for line in logs] == ["rpc_refused"]
    assert records == []
