"""Whatever an operator sends is answered in words: no value of any field is a fault of the coordinator."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
import structlog

from fl_server.run_config import to_spec
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server.admin_stack import admin_of
from tests.fl_server.devices import Device
from tests.fl_server.extremes import changed
from tests.fl_server.harness import World, run_config

METHODS = pb.DESCRIPTOR.services_by_name["Admin"].methods_by_name
OUR_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


@pytest.fixture
async def world(tmp_path):
    """A coordinator with a run and a client."""
    async with World(tmp_path / "state") as world:
        await Device("edge-1").come(world)
        await world.create(name="here", round={"clients_per_round": 2})
        yield world


def base(method):
    """A request that is all right."""
    request = METHODS[method].input_type._concrete_class()
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


async def answer(channel, method, request):
    """The status of one call, and what was said; a stream is read to its first message."""
    described = METHODS[method]
    stub = getattr(admin_pb2_grpc.AdminStub(channel), method)
    try:
        call = stub(request, timeout=20)
        if described.server_streaming:
            await call.read()
            call.cancel()
            return grpc.StatusCode.OK, ""
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("method", METHODS)
async def test_no_value_of_any_field_is_a_fault_of_ours(world, method):
    """Each extreme of each field is taken or refused in one line, and then runs, clients and history are listed."""
    async with admin_of(world) as channel:
        for field, value, request in changed(base(method)):
            with structlog.testing.capture_logs() as logs:
                code, said = await answer(channel, method, request)
            where = f"{method}, {field} = {value}: {code.name} {said}"
            assert code not in OUR_FAULT, where
            assert not [line for line in logs if line.get("exc_info")], where
            if code is not grpc.StatusCode.OK:
                assert said.isprintable(), where
                assert len(said) < 3000, where
        for listing in ("ListRuns", "ListClients", "ListHistory"):
            assert await answer(channel, listing, base(listing)) == (grpc.StatusCode.OK, ""), listing
