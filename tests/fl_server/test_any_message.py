"""Whatever a client says, in any field of any message: it is answered or refused, never an error of ours."""

from __future__ import annotations

import asyncio

import pytest

from fl_server.errors import ServerError
from fl_server.interceptors import CODES
from fl_server.views import client_status, run_status
from protos.chunks import make_chunk
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey
from tests.fl_server.devices import Device, stream
from tests.fl_server.harness import World, until
from tests.fl_server.messages import Maker

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
"""Attend has one field, the session."""
TIMES = 60
"""Messages of each kind for a seed."""


async def called(world, method, request, maker):
    """One call to its end; what is raised that is no refusal with a status of its own is raised here."""
    call, refusal = getattr(world.service, method), None
    try:
        if method == "SubmitUpdate":
            chunk = pb.SubmitUpdateRequest(chunk=make_chunk(b"\0" * 64, 0, 64))
            await call(stream(request, chunk, maker.fill(pb.SubmitUpdateRequest())), None)
        elif method == "FetchModel":
            async for _ in call(request, None):
                pass
        else:
            await call(request, None)
    except ServerError as error:
        refusal = error
    assert refusal is None or type(refusal) in CODES
    assert len(str(refusal)) < 3000


def known_values(device, assignment):
    """What a field takes that is to be right now and then: else nothing would come far."""
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
        "header": device.kept_header,
        "payloads": device.kept_header.payloads[0],
        "state_epoch": assignment.state_epoch,
    }


@pytest.mark.parametrize("seed", range(6))
async def test_no_message_is_an_error_of_the_coordinator(tmp_path, seed):
    """Descriptors say which fields there are, so a new one is tried too. The honest go on beside it."""
    async with World(tmp_path, quarantine={"after": 0, "failures": 0}, registrations_per_s=1e6) as world:
        honest = [await Device(name).come(world) for name in "bc"]
        bad = await Device("a", works=False, eval_examples=5).come(world)
        run = await world.create(**SCAFFOLD)
        assignment = await bad.assigned()
        bad.kept_header, _ = await bad.update(world, assignment)
        maker = Maker(seed, known_values(bad, assignment))
        for method in [name for name in CALLS for _ in range(TIMES)]:
            if world.fleet._sessions.of("a") is None or world.fleet._sessions.of("a").id != bad.session:
                await bad.come(world)
                maker = Maker(maker._chance.randrange(1 << 30), known_values(bad, bad.told("assignment")[-1]))
            request = maker.fill(CALLS[method]())
            await asyncio.wait_for(called(world, method, request, maker), 30)
            client_status(world.fleet, world.fleet.record("a")).SerializeToString()
            run_status(run).SerializeToString()
        assert run.ended is False
        await bad.leave()
        await world.operators.forget("a", "admin")
        done = len(run.log.commits)
        await until(lambda: len(run.log.commits) > done + 2, "the honest go on")
        assert all(device.receipts for device in honest)
        await world.coordinator.stop(run, "", "admin")
        assert run.status == "stopped"


@pytest.mark.parametrize("number", [9, 99, -1, 2**31 - 1, -(2**31)])
async def test_unknown_enum_numbers_are_taken_as_unspecified(tmp_path, number):
    """In every enum of a client's messages, with all else right: the call is answered, and who gives up is out."""
    async with World(tmp_path) as world:
        a, _ = await Device("a", works=False).come(world), await Device("b").come(world)
        closed = pb.Availability(reason=number, detail="gravity")
        await world.service.Register(a.registration(availability=closed, encodings=[number]), None)
        await a.come(world)
        run = await world.create(round={"clients_per_round": 2, "quorum": 1}, stop={"rounds": 2})
        work = await a.assigned()
        header, data = await a.update(world, work)
        header.payloads[0].kind = number
        receipt = await a._send(world, header, data)
        assert not receipt.admitted
        failure = pb.WorkFailure(key=ExchangeKey(run_id="r", round=1), reason=number, message="?")
        await a.assigned(1)
        request = pb.ReportStatusRequest(session_id=a.session, availability=closed, failures=[failure])
        await world.service.ReportStatus(request, None)
        await world.completed()
        assert run.log.commits[1].accepted == 1
