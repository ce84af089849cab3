"""Random values in every field of every message: each call is served or refused, and never an internal error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from grpc import StatusCode

from fl_server.clients import contested_identities, transfer_limits
from fl_server.errors import ServerError
from fl_server.rpc.views import client_status, run_status
from protos.chunks import make_chunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import Assignment, ExchangeKey, UpdateHeader
from tests.fl_server.devices import NO_CONTEXT, Device, stream
from tests.fl_server.harness import TIMEOUT_S, World, until
from tests.fl_server.random_messages import MessageGenerator
from tests.marks import slow_except

SCAFFOLD = {
    "algorithm": {"name": "scaffold", "parameters": {"option": "I"}},
    "population": 3,
    "round": {"sampling": "bernoulli", "rate": 1.0},
    "evaluation": {"clients_every": 1},
    "stop": {"rounds": 10_000},
}
CALLS = {
    "Register": pb.RegisterRequest,
    "FetchModel": pb.FetchModelRequest,
    "SubmitUpdate": pb.SubmitUpdateRequest,
    "QueryUpload": pb.QueryUploadRequest,
    "ReportStatus": pb.ReportStatusRequest,
    "ReportEvaluation": pb.ReportEvaluationRequest,
}
"""Attend is left out: its only field is the session."""
TIMES = 60
"""Messages of each kind for a seed."""


async def called(world: World, method: str, request: Message, maker: MessageGenerator) -> None:
    """Make one call. Raises any error that has no status of its own."""
    call, refusal = getattr(world.service, method), None
    try:
        if method == "SubmitUpdate":
            chunk = pb.SubmitUpdateRequest(chunk=make_chunk(b"\0" * 64, 0, 64))
            await call(stream(request, chunk, maker.fill(pb.SubmitUpdateRequest())), NO_CONTEXT)
        elif method == "FetchModel":
            async for _ in call(request, NO_CONTEXT):
                pass
        else:
            await call(request, NO_CONTEXT)
    except ServerError as error:
        refusal = error
    assert refusal is None or isinstance(refusal.code, StatusCode)
    assert len(str(refusal)) < 3000


def known_values(device: Device, header: UpdateHeader, assignment: Assignment) -> dict[str, Any]:
    """Valid values by field name, used at random: otherwise every message would be refused early."""
    version, source = assignment.fingerprint.version, assignment.fingerprint.source
    offer = pb.TaskOffer(name=assignment.task, train_examples=10, eval_examples=10)
    offer.fingerprint.version, offer.fingerprint.source = version, source
    return {
        "session_id": device.session,
        "client_id": device.name,
        "run_id": "r",
        "key": assignment.key,
        "digest": assignment.resources[0].digest,
        "min": 1,
        "max": 1,
        "tasks": offer,
        "offset": 0,
        "header": header,
        "payloads": header.payloads[0],
        "state_epoch": assignment.state_epoch,
    }


@pytest.mark.parametrize("seed", slow_except(range(6), 0))
async def test_no_message_is_an_error_of_the_coordinator(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are made from their descriptors, so that new fields are included. Honest clients are not affected."""
    monkeypatch.setattr(contested_identities, "HOLD_S", 0.0)  # a registration of a contested identity waits this long
    monkeypatch.setattr(transfer_limits, "REFUSAL_DELAY_S", 0.0)
    async with World(tmp_path, quarantine={"after": 0, "failures": 0}, registrations_per_s=1e6) as world:
        honest = [await Device(name).connect(world) for name in "bc"]
        bad = await Device("a", works=False, eval_examples=5).connect(world)
        run = await world.create(**SCAFFOLD)
        assignment = await bad.assigned()
        header, _ = await bad.update(world, assignment)
        maker = MessageGenerator(seed, known_values(bad, header, assignment))
        for method in [name for name in CALLS for _ in range(TIMES)]:
            session = world.fleet.sessions.of("a")
            if session is None or session.id != bad.session:
                await bad.connect(world)
                seed = maker._chance.randrange(1 << 30)
                maker = MessageGenerator(seed, known_values(bad, header, bad.pushed("assignment")[-1]))
            request = maker.fill(CALLS[method]())
            await asyncio.wait_for(called(world, method, request, maker), TIMEOUT_S)
            client_status(world.fleet, world.fleet.records.get("a")).SerializeToString()
            run_status(run).SerializeToString()
        assert run.ended is False
        await bad.leave()
        await world.operators.forget("a", "admin")
        done = run.rounds.committed
        await until(lambda: run.rounds.committed > done + 2, "the honest go on")
        assert all(device.receipts for device in honest)
        await world.coordinator.actions.stop(run, "", "admin")
        assert run.status == "stopped"


@pytest.mark.parametrize("number", slow_except([9, 99, -1, 2**31 - 1, -(2**31)], 9, -(2**31)))
async def test_unknown_enum_numbers_are_taken_as_unspecified(tmp_path: Path, number: Any) -> None:
    """In every enum of a client's messages: the call is served, and a reported failure counts."""
    async with World(tmp_path) as world:
        a, _ = await Device("a", works=False).connect(world), await Device("b").connect(world)
        closed = pb.Availability(reason=number, detail="gravity")
        await world.service.Register(a.registration(availability=closed, encodings=[number]), NO_CONTEXT)
        await a.connect(world)
        run = await world.create(round={"clients_per_round": 2, "quorum": 1}, stop={"rounds": 2})
        work = await a.assigned()
        header, data = await a.update(world, work)
        header.payloads[0].kind = number
        receipt = await a._send(world, header, data)
        assert not receipt.admitted
        failure = pb.WorkFailure(key=ExchangeKey(run_id="r", round=1), reason=number, message="?")
        await a.assigned(1)
        request = pb.ReportStatusRequest(session_id=a.session, availability=closed, failures=[failure])
        await world.service.ReportStatus(request, NO_CONTEXT)
        await world.completed()
        assert run.rounds.recent[1].accepted == 1
