"""Calls in the audit log: every call of an operator, with its result; refusals; and no change without a row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from fl_common.audit import AuditRow
from fl_server import errors, identity
from fl_server.audit import log as log_module
from fl_server.audit.calls import record_of
from fl_server.identity import Identity
from fl_server.rpc.interceptors import AuditedMethod
from fl_server.rpc.methods import ADMIN, METHODS
from fl_server.store.errors import StoreFull
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator that knows one client."""
    async with World(tmp_path) as world:
        await Device("a").connect(world)
        yield world


@pytest.fixture
async def stub(world: World) -> AsyncIterator[Any]:
    """The Admin service on a real port, in plain text."""
    async with admin_channel(world) as channel:
        yield admin_pb2_grpc.AdminStub(channel)


def rows(world: World) -> list[AuditRow]:
    """All rows of the ledger."""
    found: list[AuditRow] = world.store.audit_rows(1, 10**6, 5000, {}).rows
    return found


def short(world: World) -> list[tuple[str, str, str, str]]:
    """Method, subject, result and detail of all rows."""
    return [(row.method, row.subject, row.result, row.detail) for row in rows(world)]


def fail_writes(world: World, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> Callable[[], None]:
    """The ledger takes no rows of the audit log, except the first `after`. Returns what ends that."""
    write, failing = world.store.add_audit_rows, [True]
    taken: list[Any] = []

    def add(*given: Any, **options: Any) -> Any:
        if failing and len(taken) >= after:
            raise StoreFull("no space")
        taken.append(given)
        return write(*given, **options)

    monkeypatch.setattr(world.store, "add_audit_rows", add)
    return failing.clear


def test_every_method_of_the_service_has_an_entry() -> None:
    """And no other one. A new method must say whether it changes something."""
    recorded = {name.removeprefix(ADMIN) for name, method in METHODS.items() if method.recorded is not None}
    assert recorded == {method.name for method in SERVICE.methods}


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
def test_every_entry_fits_its_request(method: str) -> None:
    """Subjects and details are read from an empty request, and details are fields of it."""
    descriptor = SERVICE.methods_by_name[method]
    request = getattr(pb, descriptor.input_type.name)()
    what = METHODS[ADMIN + method].recorded
    assert what is not None
    assert what.subject(request) == ""
    assert what.detail(request) == ""
    assert set(what.details) <= set(request.DESCRIPTOR.fields_by_name)
    what.made(getattr(pb, descriptor.output_type.name)())


def test_a_made_token_has_no_secret_in_its_row() -> None:
    """Only its id, which opens nothing."""
    token = pb.EnrollmentToken(id="a1b2", spec=pb.EnrollmentSpec(name="edge-7"))
    response = pb.CreateEnrollmentsResponse(created=[pb.CreatedEnrollment(enrollment=token, token="a1b2.secret")])
    recorded = METHODS[f"{ADMIN}CreateEnrollments"].recorded
    assert recorded is not None
    assert recorded.made(response) == "a1b2"


async def test_a_change_has_a_row_before_and_after(world: World, stub: Any) -> None:
    """With the reason, the address, and the number of the first row in the second."""
    await stub.BanClient(pb.BanClientRequest(client_id="a", reason="lost device"))
    assert short(world) == [
        ("BanClient", "a", "asked", "reason=lost device"),
        ("BanClient", "a", "ok", "asked in row 1, reason=lost device"),
    ]
    assert {row.actor for row in rows(world)} == {"anybody"}
    assert all(row.address.startswith("127.0.0.1:") for row in rows(world))


async def test_a_refused_change_has_its_code_and_why(world: World, stub: Any) -> None:
    """A run that does not exist."""
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.StopRun(pb.StopRunRequest(run_id="r", reason="late"))
    [_, (_, subject, result, detail)] = short(world)
    assert (subject, result) == ("r", "not_found")
    assert detail.startswith("asked in row 1, reason=late; no run 'r'")


async def test_a_made_run_is_the_subject(world: World, stub: Any) -> None:
    """The request names a task, and the row of the result has the run's id."""
    spec = pb.RunSpec(task=pb.TaskSpec(name=world.config.tasks[0]))
    spec.algorithm.name = "fedavg"
    made = await stub.CreateRun(pb.CreateRunRequest(spec=spec))
    found = [(row.subject, row.result) for row in rows(world)]
    assert found == [(world.config.tasks[0], "asked"), (made.run.run_id, "ok")]


async def test_a_change_without_a_row_is_not_made(world: World, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: the call is refused at once, and can be repeated."""
    end = fail_writes(world, monkeypatch)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.BanClient(pb.BanClientRequest(client_id="a", reason="lost"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "cannot write: no space" in (caught.value.details() or "")
    assert not world.store.client("a").banned
    end()
    await stub.BanClient(pb.BanClientRequest(client_id="a", reason="lost"))
    assert world.store.client("a").banned


async def test_a_read_is_answered_without_a_row(world: World, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk stops nobody from looking; the row follows."""
    end = fail_writes(world, monkeypatch)
    await stub.ListRuns(pb.ListRunsRequest())
    assert rows(world) == []
    end()
    await until(lambda: rows(world), "the row is written")
    assert short(world) == [("ListRuns", "", "ok", "")]


async def test_a_made_change_is_answered_although_its_result_cannot_be_written(
    world: World, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of before is there, so the answer waits for a limited time only."""
    monkeypatch.setattr(log_module, "ANSWER_S", 0.05)
    end = fail_writes(world, monkeypatch, after=1)
    response = await stub.BanClient(pb.BanClientRequest(client_id="a", reason="lost"))
    assert response.client.client_id == "a"
    assert [row.result for row in rows(world)] == ["asked"]
    end()
    await until(lambda: len(rows(world)) == 2, "the result is written")
    assert rows(world)[1].result == "ok"


async def test_the_result_of_a_change_is_recorded_although_its_caller_hung_up(
    world: World, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is completed, and so is its record."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    put = world.services.ledger.do

    async def slow(method: Any, *given: Any, **options: Any) -> Any:
        if method == world.services.ledger.store.put_clients:
            begun.set()
            await go_on.wait()
        return await put(method, *given, **options)

    monkeypatch.setattr(world.services.ledger, "do", slow)
    call = stub.BanClient(pb.BanClientRequest(client_id="a", reason="lost"))
    waiting = asyncio.ensure_future(ended(call))
    await asyncio.wait({asyncio.ensure_future(begun.wait()), waiting}, return_when=asyncio.FIRST_COMPLETED)
    call.cancel()
    await waiting
    go_on.set()
    await until(lambda: len(rows(world)) == 2, "the result is written")
    assert rows(world)[1].result == "ok"


async def ended(call: Any) -> None:
    """The call is over."""
    with suppress(asyncio.CancelledError):
        await call


async def test_a_watched_run_has_a_row_at_the_begin_and_at_the_end(world: World, stub: Any) -> None:
    """It may be watched for days."""
    await world.create()
    call = stub.WatchRun(pb.WatchRunRequest(run_id="r"))
    await call.read()
    await until(lambda: rows(world), "the row is written")
    assert short(world) == [("WatchRun", "r", "begun", "")]
    call.cancel()
    await until(lambda: len(rows(world)) == 2, "the end is written")
    assert short(world)[1] == ("WatchRun", "r", "cancelled", "")


async def test_a_model_is_given_away_behind_its_row(world: World, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row, no model."""
    await world.create()
    end = fail_writes(world, monkeypatch)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ExportModel(pb.ExportModelRequest(run_id="r", round="latest")).read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    end()
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in stub.ExportModel(pb.ExportModelRequest(run_id="no-such")):
            pass
    await until(lambda: len(rows(world)) == 2, "the end is written")
    assert [(row.method, row.subject, row.result) for row in rows(world)] == [
        ("ExportModel", "no-such", "asked"), ("ExportModel", "no-such", "not_found"),
    ]  # fmt: skip


async def test_a_request_that_is_none_is_recorded(world: World) -> None:
    """Also a call whose request could not be read."""
    async with admin_channel(world) as channel:
        raw: Any = channel.unary_unary(f"{ADMIN}BanClient")
        with pytest.raises(grpc.aio.AioRpcError):
            await raw(b"\xff\xff\xff")
    await until(lambda: rows(world), "the row is written")
    [(method, _, result, _)] = short(world)
    assert (method, result) == ("BanClient", "invalid_argument")


def refused(method: str, error: Exception, world: World) -> None:
    """A call of this method ends with this error, before its request was accepted."""
    row = METHODS.get(method)
    name, recorded = method.rpartition("/")[2], None if row is None else row.recorded
    AuditedMethod(name, world.services.audit, recorded).refused(error)


async def test_refusals_of_identity_are_recorded_for_every_service(world: World) -> None:
    """With the caller as its certificate names it. Other errors of clients are not recorded."""
    identity.caller.set(Identity("client", "edge-3"))
    identity.address.set("192.0.2.7:5000")
    register = "/fl.v1.Coordinator/Register"
    refused(register, errors.Forbidden("client:edge-3", "another name"), world)
    refused(register, errors.CertificateEnded("client:edge-3", 0.0), world)
    refused(register, errors.Revoked("client:edge-3", "lost device"), world)
    refused(register, errors.Unauthenticated("the token is no JWT"), world)
    for routine in (errors.UnknownSessionError(), errors.InvalidInput("x", "y", "z"), errors.NotNow("full", 1.0)):
        refused(register, routine, world)
    await until(lambda: len(rows(world)) == 4, "all are written")
    assert [(row.actor, row.address, row.method, row.result) for row in rows(world)] == [
        ("client:edge-3", "192.0.2.7:5000", "Register", "permission_denied"),
        ("client:edge-3", "192.0.2.7:5000", "Register", "unauthenticated"),
        ("client:edge-3", "192.0.2.7:5000", "Register", "permission_denied"),
        ("client:edge-3", "192.0.2.7:5000", "Register", "unauthenticated"),
    ]


async def test_list_audit_has_pages_filters_and_the_head(world: World, stub: Any) -> None:
    """Every row once; the newest of a filter; a time."""
    for name in ("x", "y", "x", "y", "x"):
        await world.services.audit.add(record_of("Test", name, "ok", "by hand"), at_once=True)
    first = await stub.ListAudit(pb.ListAuditRequest(page_size=3))
    assert [entry.number for entry in first.entries] == [1, 2, 3]
    second = await stub.ListAudit(pb.ListAuditRequest(page_size=3, page_token=first.next_page_token))
    assert [entry.number for entry in second.entries] == [4, 5]
    assert not second.next_page_token
    assert (first.head_number, first.head_hash) == (5, second.entries[-1].hash)

    async def numbers(**wanted: Any) -> list[int]:
        found = await stub.ListAudit(pb.ListAuditRequest(method="Test", **wanted))
        return [entry.number for entry in found.entries]

    assert await numbers(subject="x") == [1, 3, 5]
    assert await numbers(subject="x", limit=2) == [3, 5]
    assert await numbers(limit=2) == [4, 5]
    assert await numbers(subject="y", first=3) == [4]
    assert await numbers(result="permission_denied", limit=3) == []
    assert await numbers(since=second.entries[0].time) == [4, 5]
    with pytest.raises(grpc.aio.AioRpcError):
        await numbers(limit=10_001)
