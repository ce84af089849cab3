"""Extreme values in every field of operators' requests: none causes an internal error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog

from fl_server.run_settings.spec import to_spec
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.devices import Device
from tests.fl_server.extreme_values import changed
from tests.fl_server.harness import TIMEOUT_S, World, run_config
from tests.marks import slow_except

METHODS = pb.DESCRIPTOR.services_by_name["Admin"].methods_by_name
OUR_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator with a run and a client."""
    async with World(tmp_path / "state") as world:
        await Device("edge-1").connect(world)
        await world.create(name="here", round={"clients_per_round": 2})
        yield world


def base(method: str) -> Any:
    """A valid request."""
    kind: Any = METHODS[method].input_type
    request = kind._concrete_class()
    fields = request.DESCRIPTOR.fields_by_name
    if "run_id" in fields:
        request.run_id = "here"
    if "client_id" in fields:
        request.client_id = "edge-1"
    if method == "CreateRun":
        request.spec.CopyFrom(to_spec(run_config(name="")))
    if method == "ExtendRun":
        request.rounds = 1
    return request


async def answer(channel: grpc.aio.Channel, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
    """The status and details of one call; of a stream only the first message is read."""
    described = METHODS[method]
    stub = getattr(admin_pb2_grpc.AdminStub(channel), method)
    try:
        call = stub(iter([request]) if described.client_streaming else request, timeout=TIMEOUT_S)
        if described.server_streaming:
            await call.read()
            call.cancel()
            return grpc.StatusCode.OK, ""
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.slow
@pytest.mark.parametrize("method", slow_except(METHODS, *(name for name in METHODS if name != "CreateRun")))
async def test_no_value_of_any_field_is_an_internal_error(world: World, method: str) -> None:
    """Each extreme value is accepted or refused in one line; then runs, clients and history can be listed."""
    async with admin_channel(world) as channel:
        for field, value, request in changed(base(method)):
            with structlog.testing.capture_logs() as logs:
                code, details = await answer(channel, method, request)
            where = f"{method}, {field} = {value}: {code.name} {details}"
            assert code not in OUR_FAULT, where
            assert not [line for line in logs if line.get("exc_info")], where
            if code is not grpc.StatusCode.OK:
                assert details.isprintable(), where
                assert len(details) < 3000, where
        for listing in ("ListRuns", "ListClients", "ListHistory"):
            assert await answer(channel, listing, base(listing)) == (grpc.StatusCode.OK, ""), listing
