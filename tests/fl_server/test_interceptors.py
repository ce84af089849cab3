"""Around every call: each error becomes one status with its detail, and what was begun is finished."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from fl_server import errors
from fl_server.interceptors import CODES, CallPolicy
from fl_server.metrics import Metrics
from fl_server.rpc.callers import Callers
from fl_server.store.base import StoreError, StoreFull
from protos.fl.v1 import errors_pb2
from protos.fl.v1.training_pb2 import ExchangeKey
from protos.status import detail_of
from tests.fl_server.echo import calling
from tests.fl_server.harness import until

KEY = ExchangeKey(run_id="r", round=3)
CASES = [
    (errors.InvalidInput("seed", "a number", "x"), "INVALID_ARGUMENT", errors_pb2.InvalidField),
    (errors.UnknownSessionError(), "UNAUTHENTICATED", errors_pb2.UnknownSession),
    (errors.CertificateEnded("client:a", 0.0), "UNAUTHENTICATED", None),
    (errors.Contested("a", 2.5), "ABORTED", errors_pb2.RetryLater),
    (errors.Fenced("a", by_other_instance=True), "ABORTED", errors_pb2.SessionFenced),
    (errors.NoCommonProtocol((2, 3), (1, 1)), "FAILED_PRECONDITION", errors_pb2.ProtocolMismatch),
    (errors.Forbidden("client:a", "role admin"), "PERMISSION_DENIED", errors_pb2.NotAllowed),
    (errors.NoSuchResource("blake3:00"), "NOT_FOUND", errors_pb2.UnknownResource),
    (errors.NoSuchRun("r"), "NOT_FOUND", errors_pb2.UnknownRun),
    (errors.RunExists("r"), "ALREADY_EXISTS", errors_pb2.UnknownRun),
    (errors.NoSuchClient("a"), "NOT_FOUND", errors_pb2.UnknownClient),
    (errors.WrongState("r", "paused", ("running",), "pausing"), "FAILED_PRECONDITION", errors_pb2.WrongRunState),
    (errors.UploadBroken(KEY, 100, "cut"), "DATA_LOSS", errors_pb2.BrokenUpload),
    (errors.NotNow("full", 2.5), "UNAVAILABLE", errors_pb2.RetryLater),
    (errors.LimitExceeded("4 uploads at once", 1.0), "RESOURCE_EXHAUSTED", errors_pb2.RetryLater),
    (errors.TooMany("8 calls at once", 2.5), "RESOURCE_EXHAUSTED", errors_pb2.RetryLater),
    (errors.NoSuchService("x", ["live"]), "NOT_FOUND", type(None)),
]


@pytest.fixture
def metrics():
    """Metrics in a registry of their own."""
    return Metrics(CollectorRegistry())


def raising(error):
    """The three kinds of methods, each of which fails."""

    async def single(request, context):
        raise error

    async def down(request, context):
        yield b"first"
        raise error

    return {"One": single, "Up": single, "Down": down}


async def failed(call):
    """The error that a call ended with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def calls(metrics, rpc, code):
    """How many calls of a method were counted with a code."""
    return metrics.registry.get_sample_value("fl_rpc_seconds_count", {"rpc": rpc, "code": code}) or 0


def test_every_error_has_a_code():
    """The table of codes and the tree of errors have the same leaves; the cases here are all of them."""
    leaves = set(errors.ServerError.__subclasses__())
    assert set(CODES) == leaves == {type(error) for error, _, _ in CASES}


@pytest.mark.parametrize(("error", "code", "detail"), CASES, ids=[type(case[0]).__name__ for case in CASES])
async def test_an_error_becomes_a_status(metrics, error, code, detail):
    """Code, words and detail arrive, whatever the kind of call; each is counted under that code."""
    async with calling(metrics, "fl.v1.Coordinator", **raising(error)) as caller:
        for rpc, call in (("One", caller.one()), ("Up", caller.up(b"1")), ("Down", caller.down())):
            came = await failed(call)
            assert (came.code().name, came.details()) == (code, str(error))
            found = detail_of(came.trailing_metadata())
            assert (found if detail is None else type(found), found) == (detail, error.detail)
            await until(lambda rpc=rpc: calls(metrics, rpc, code) == 1, "it is counted")


async def test_a_full_disk_is_not_now(metrics):
    """The caller is told to try again, and the call is not counted as a fault of ours."""
    async with calling(metrics, "fl.v1.Admin", **raising(StoreFull("no room"))) as caller:
        came = await failed(caller.one())
    assert came.code() is grpc.StatusCode.UNAVAILABLE
    assert came.details() == "the coordinator cannot write: no room; try again in 5 s"
    assert detail_of(came.trailing_metadata()).wait.seconds == 5
    assert (calls(metrics, "One", "UNAVAILABLE"), calls(metrics, "One", "INTERNAL")) == (1, 0)


@pytest.mark.parametrize(("error", "told"), [(errors.NotNow("full", 2.5), 1), (errors.UnknownSessionError(), 0)])
async def test_what_a_restart_brings_is_counted_and_not_logged(metrics, error, told):
    """Ten thousand clients do not know yet that their sessions are gone; other refusals have a line each."""
    with capture_logs() as logs:
        async with calling(metrics, "fl.v1.Coordinator", **raising(error)) as caller:
            code = (await failed(caller.one())).code().name
            await until(lambda: calls(metrics, "One", code) == 1, "it is counted")
    assert [line["event"] for line in logs] == ["rpc_refused"] * told


@pytest.mark.parametrize("error", [StoreError("secret"), KeyError("secret")], ids=["store", "bug"])
async def test_a_fault_of_ours_is_told_without_its_cause(metrics, error):
    """The cause is for the log alone."""
    async with calling(metrics, "fl.v1.Coordinator", **raising(error)) as caller:
        came = await failed(caller.down())
    assert (came.code(), "secret" in came.details()) == (grpc.StatusCode.INTERNAL, False)
    assert came.details() == "the coordinator failed in Down: see its log"


async def test_good_calls_pass_through(metrics):
    """Requests and answers of all three kinds, counted as OK."""

    async def one(request, context):
        return request + b"!"

    async def up(requests, context):
        return b"".join([each async for each in requests])

    async def down(request, context):
        for _ in range(2):
            yield request

    async with calling(metrics, "fl.v1.Coordinator", One=one, Up=up, Down=down) as caller:
        assert await caller.one(b"a") == b"a!"
        assert await caller.up(b"a", b"b") == b"ab"
        assert await caller.down(b"a") == [b"a", b"a"]
    assert [calls(metrics, rpc, "OK") for rpc in ("One", "Up", "Down")] == [1, 1, 1]


async def test_other_services_are_left_alone(metrics):
    """Health and reflection are not counted here, and what goes wrong there is a status too."""
    async with calling(metrics, "grpc.health.v1.Health", **raising(errors.NotNow("x", 1.0))) as caller:
        came = await failed(caller.one())
    assert came.code() is grpc.StatusCode.UNAVAILABLE
    assert calls(metrics, "One", "UNAVAILABLE") == 0


async def test_a_call_is_done_whole_though_its_caller_hangs_up(metrics):
    """An operator who leaves in the middle of a change leaves no half of it."""
    began, hung_up, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def one(request, context):
        context.add_done_callback(lambda _: hung_up.set())
        began.set()
        await hung_up.wait()
        await asyncio.sleep(0)
        done.set()
        return b""

    async with calling(metrics, "fl.v1.Admin", One=one) as caller:
        call = caller.one()
        await began.wait()
        call.cancel()
        await until(done.is_set, "it is done all the same")


async def test_an_upload_ends_when_its_caller_hangs_up(metrics):
    """A stream of requests has nobody to come from any more."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def up(requests, context):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with calling(metrics, "fl.v1.Coordinator", Up=up) as caller:
        call = caller.up(b"1")
        await began.wait()
        call.cancel()
        await until(ended.is_set, "it ends")


async def test_a_call_without_a_request_is_refused(metrics):
    """The caller ends its side before it sent one."""
    async with calling(metrics, "fl.v1.Coordinator", One=echoed) as caller:
        came = await failed(caller.channel.stream_unary("/fl.v1.Coordinator/One")(iter(()), timeout=20))
    assert (came.code(), came.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "request: expected a request of One, got none",
    )


async def test_a_request_that_does_not_come_is_given_up(metrics):
    """A call that brings nothing holds its place for so long, and not for ever."""

    async def nothing():
        await asyncio.Event().wait()
        yield b""

    policy = CallPolicy(metrics, Callers(1, 1), stall_s=0.05)
    async with calling(metrics, "fl.v1.Coordinator", policy=policy, One=echoed) as caller:
        came = await failed(caller.channel.stream_unary("/fl.v1.Coordinator/One")(nothing(), timeout=20))
        assert (came.code(), came.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "no request came within 0.05 s; try again in 1 s",
        )
        assert await caller.one(b"x") == b"x"


async def test_a_call_too_many_is_refused_before_its_request_comes(metrics):
    """With a wait, counted, without a line in the log; the place is free again when the call is over."""
    free = asyncio.Event()

    async def waiting(request, context):
        await free.wait()
        return request

    policy = CallPolicy(metrics, Callers(1, 10))
    async with calling(metrics, "fl.v1.Coordinator", policy=policy, One=waiting) as caller:
        first = asyncio.ensure_future(caller.one(b"a"))
        await until(lambda: policy.callers._open, "it is open")
        with capture_logs() as logs:
            came = await failed(caller.one(b"b" * 100_000))
        assert came.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail_of(came.trailing_metadata()).wait.seconds == 1
        free.set()
        assert await first == b"a"
        await until(lambda: not policy.callers._open, "it is over")
        assert await caller.one(b"c") == b"c"
    assert logs == []
    labels = {"port": "listen", "reason": "calls"}
    assert metrics.registry.get_sample_value("fl_requests_refused_total", labels) == 1


async def test_a_call_whose_caller_hung_up_keeps_its_place_until_it_is_done(metrics):
    """It goes on, so it counts: hanging up must not be a way to have more of them."""
    began, free = asyncio.Event(), asyncio.Event()

    async def waiting(request, context):
        began.set()
        await free.wait()
        return request

    policy = CallPolicy(metrics, Callers(1, 10))
    async with calling(metrics, "fl.v1.Coordinator", policy=policy, One=waiting) as caller:
        first = caller.one(b"a")
        await began.wait()
        first.cancel()
        assert (await failed(caller.one(b"b"))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        free.set()
        await until(lambda: not policy.callers._open, "it is done")


async def test_a_refusal_names_the_address_that_it_came_from(metrics):
    """Beside who the certificate names: an operator has to find the device."""
    with capture_logs() as logs:
        async with calling(metrics, "fl.v1.Coordinator", **raising(errors.NoSuchRun("r"))) as caller:
            await failed(caller.one())
    assert logs[0]["peer"].startswith("127.0.0.1:")


async def echoed(request, context):
    """What came."""
    return request
