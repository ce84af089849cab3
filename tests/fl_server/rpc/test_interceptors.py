"""Interceptors around every call: each error becomes a status with its detail, and started calls finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import Any, cast

import grpc
import pytest
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from fl_server import errors
from fl_server.metrics import Metrics
from fl_server.rpc.call_limits import CallLimits
from fl_server.store.errors import StoreError, StoreFull
from protos.fl.v1 import errors_pb2
from protos.fl.v1.training_pb2 import ExchangeKey
from protos.status import detail_of
from tests.fl_server.echo import calling, echo_policy
from tests.fl_server.harness import TIMEOUT_S, until

KEY = ExchangeKey(run_id="r", round=3)
CASES = [
    (errors.InvalidInput("seed", "a number", "x"), "INVALID_ARGUMENT", errors_pb2.InvalidField),
    (errors.UnknownSessionError(), "UNAUTHENTICATED", errors_pb2.UnknownSession),
    (errors.CertificateEnded("client:a", 0.0), "UNAUTHENTICATED", None),
    (errors.Unauthenticated("needed: a token"), "UNAUTHENTICATED", None),
    (errors.Contested("a", 2.5), "ABORTED", errors_pb2.RetryLater),
    (errors.Fenced("a", by_other_instance=True), "ABORTED", errors_pb2.SessionFenced),
    (errors.NoCommonProtocol((2, 3), (1, 1)), "FAILED_PRECONDITION", errors_pb2.ProtocolMismatch),
    (errors.Forbidden("client:a", "role admin"), "PERMISSION_DENIED", errors_pb2.NotAllowed),
    (errors.NoSuchToken("0123456789abcdef"), "NOT_FOUND", None),
    (errors.NoSuchRelease("digits", 3), "NOT_FOUND", None),
    (errors.WrongRelease("it is rolled back"), "FAILED_PRECONDITION", None),
    (errors.NotConfigured("enrollment", "enroll_listen"), "FAILED_PRECONDITION", None),
    (errors.NoSuchResource("blake3:00"), "NOT_FOUND", errors_pb2.UnknownResource),
    (errors.NoSuchRun("r"), "NOT_FOUND", errors_pb2.UnknownRun),
    (
        errors.Relayed(grpc.StatusCode.DATA_LOSS, "other bytes", errors_pb2.BrokenUpload(kept_bytes=3)),
        "DATA_LOSS",
        errors_pb2.BrokenUpload,
    ),
    (errors.NoSuchModel("r", 3, [4]), "NOT_FOUND", None),
    (errors.NoBestRound("r", "mae", ["loss"]), "NOT_FOUND", None),
    (errors.TooFewUpdates("r", 3, 1, 3), "PERMISSION_DENIED", None),
    (errors.RunExists("r"), "ALREADY_EXISTS", errors_pb2.UnknownRun),
    (errors.NoSuchClient("a"), "NOT_FOUND", errors_pb2.UnknownClient),
    (errors.WrongState("r", "paused", ("running",), "pausing"), "FAILED_PRECONDITION", errors_pb2.WrongRunState),
    (errors.RunBroke("r", "no room"), "FAILED_PRECONDITION", errors_pb2.WrongRunState),
    (errors.UploadBroken(KEY, 100, "cut"), "DATA_LOSS", errors_pb2.BrokenUpload),
    (errors.NotNow("full", 2.5), "UNAVAILABLE", errors_pb2.RetryLater),
    (errors.LimitExceeded("4 uploads at once", 1.0), "RESOURCE_EXHAUSTED", errors_pb2.RetryLater),
    (errors.TooMany("8 calls at once", 2.5), "RESOURCE_EXHAUSTED", errors_pb2.RetryLater),
    (errors.NoSuchService("x", ["live"]), "NOT_FOUND", type(None)),
]


@pytest.fixture
def metrics() -> Metrics:
    """Metrics in a registry of their own."""
    return Metrics(CollectorRegistry())


def failing_methods(error: Exception) -> dict[str, Any]:
    """Methods of the three kinds that fail with this error."""

    async def single(request: Any, context: Any) -> None:
        raise error

    async def down(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise error

    return {"One": single, "Up": single, "Down": down}


async def error_of(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """The error of a failed call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def calls(metrics: Metrics, rpc: str, code: str) -> float | None:
    """The counted calls of a method with a code."""
    return metrics.registry.get_sample_value("fl_rpc_seconds_count", {"rpc": rpc, "code": code}) or 0


def test_every_error_has_a_code() -> None:
    """Each error has one, and the cases here cover all errors."""
    kinds = set(errors.ServerError.__subclasses__())
    assert kinds == {type(error) for error, _, _ in CASES}
    assert {kind for kind in kinds - {errors.Relayed} if not isinstance(kind.code, grpc.StatusCode)} == set()


def counted(metrics: Metrics, rpc: str, code: str) -> bool:
    """Whether one call of a method ended with this code."""
    return calls(metrics, rpc, code) == 1


def retry_of(error: grpc.aio.AioRpcError) -> errors_pb2.RetryLater:
    """The retry detail of a status."""
    found = detail_of(error.trailing_metadata())
    assert isinstance(found, errors_pb2.RetryLater)
    return found


@pytest.mark.parametrize(("error", "code", "detail"), CASES, ids=[type(case[0]).__name__ for case in CASES])
async def test_an_error_becomes_a_status(metrics: Metrics, error: Exception, code: str, detail: Message | None) -> None:
    """Code, message and detail arrive for each kind of call; each call is counted under that code."""
    async with calling(metrics, "fl.v1.Coordinator", **failing_methods(error)) as caller:
        for rpc, call in (("One", caller.one()), ("Up", caller.up(b"1")), ("Down", caller.down())):
            received = await error_of(call)
            assert (received.code().name, received.details()) == (code, str(error))
            found = detail_of(received.trailing_metadata())
            assert (found if detail is None else type(found), found) == (detail, getattr(error, "detail", None))
            await until(partial(counted, metrics, rpc, code), "it is counted")


async def test_a_full_disk_is_not_now(metrics: Metrics) -> None:
    """The caller should try again, and the call does not count as an internal error."""
    async with calling(metrics, "fl.v1.Admin", **failing_methods(StoreFull("no room"))) as caller:
        received = await error_of(caller.one())
        await until(partial(counted, metrics, "One", "UNAVAILABLE"), "it is counted")
    assert received.code() is grpc.StatusCode.UNAVAILABLE
    assert received.details() == "the coordinator cannot write: no room; try again in 5 s"
    assert retry_of(received).wait.seconds == 5
    assert (calls(metrics, "One", "UNAVAILABLE"), calls(metrics, "One", "INTERNAL")) == (1, 0)


@pytest.mark.parametrize(("error", "logged"), [(errors.NotNow("full", 2.5), 1), (errors.UnknownSessionError(), 0)])
async def test_refusals_after_a_restart_are_counted_and_not_logged(
    metrics: Metrics, error: Exception, logged: int
) -> None:
    """Ten thousand clients still use their old sessions; other refusals are logged each."""
    with capture_logs() as logs:
        async with calling(metrics, "fl.v1.Coordinator", **failing_methods(error)) as caller:
            code = (await error_of(caller.one())).code().name
            await until(lambda: calls(metrics, "One", code) == 1, "it is counted")
    assert [line["event"] for line in logs] == ["rpc_refused"] * logged


@pytest.mark.parametrize("error", [StoreError("secret"), KeyError("secret")], ids=["store", "bug"])
async def test_an_internal_error_hides_its_cause(metrics: Metrics, error: Exception) -> None:
    """Only the log has the cause."""
    async with calling(metrics, "fl.v1.Coordinator", **failing_methods(error)) as caller:
        received = await error_of(caller.down())
    assert (received.code(), "secret" in (received.details() or "")) == (grpc.StatusCode.INTERNAL, False)
    assert received.details() == "the coordinator failed in Down: see its log"


async def test_successful_calls_pass_through(metrics: Metrics) -> None:
    """Requests and responses of all three kinds, counted as OK."""

    async def one(request: bytes, context: Any) -> bytes:
        return request + b"!"

    async def up(requests: Any, context: Any) -> bytes:
        return b"".join([each async for each in requests])

    async def down(request: Any, context: Any) -> AsyncIterator[bytes]:
        for _ in range(2):
            yield request

    async with calling(metrics, "fl.v1.Coordinator", One=one, Up=up, Down=down) as caller:
        assert await caller.one(b"a") == b"a!"
        assert await caller.up(b"a", b"b") == b"ab"
        assert await caller.down(b"a") == [b"a", b"a"]
        for rpc in ("One", "Up", "Down"):
            await until(partial(counted, metrics, rpc, "OK"), "it is counted")
    assert [calls(metrics, rpc, "OK") for rpc in ("One", "Up", "Down")] == [1, 1, 1]


async def test_other_services_are_not_counted(metrics: Metrics) -> None:
    """Health and reflection are not counted here, and their errors become a status as well."""
    async with calling(metrics, "grpc.health.v1.Health", **failing_methods(errors.NotNow("x", 1.0))) as caller:
        received = await error_of(caller.one())
    assert received.code() is grpc.StatusCode.UNAVAILABLE
    assert calls(metrics, "One", "UNAVAILABLE") == 0


async def test_a_call_is_finished_after_its_caller_hangs_up(metrics: Metrics) -> None:
    """An operator who disconnects during a change leaves no partial change."""
    started, hung_up, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def one(request: bytes, context: Any) -> bytes:
        context.add_done_callback(lambda _: hung_up.set())
        started.set()
        await hung_up.wait()
        await asyncio.sleep(0)
        done.set()
        return b""

    async with calling(metrics, "fl.v1.Admin", One=one) as caller:
        call = caller.one()
        await started.wait()
        call.cancel()
        await until(done.is_set, "it is done")


class Endless:
    """Methods of the three kinds that never end by themselves."""

    def __init__(self) -> None:
        self.started = asyncio.Event()

    async def wait(self, request: Any, context: Any) -> None:
        """Never returns."""
        self.started.set()
        await asyncio.Event().wait()

    async def send(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Sends without end, so that the transport holds it back until its reader reads."""
        while True:
            self.started.set()
            yield bytes(1 << 20)

    async def send_once(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Sends once, and then has nothing to send."""
        yield b"first"
        self.started.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("ending", "rpc", "method"),
    [
        ("cancelled", "One", "wait"),
        ("cancelled", "Up", "wait"),
        ("cancelled", "Down", "send"),
        ("cancelled", "Down", "send_once"),
        ("deadline", "One", "wait"),
        ("deadline", "Down", "send"),
    ],
)
async def test_a_cancelled_call_is_counted_as_cancelled(metrics: Metrics, ending: str, rpc: str, method: str) -> None:
    """Cancelled by its caller, or ended by its deadline; never counted as a success."""
    endless = Endless()
    async with calling(metrics, "fl.v1.Coordinator", **{rpc: getattr(endless, method)}) as caller:
        kinds = {"One": "unary_unary", "Up": "stream_unary", "Down": "unary_stream"}
        begin: Any = getattr(caller.channel, kinds[rpc])(f"/fl.v1.Coordinator/{rpc}")
        # The first deadline that lets the call start: a loaded machine needs a later one.
        for seconds in (0.5, 5.0, 60.0) if ending == "deadline" else (60.0,):
            call = begin(iter((b"1",)) if rpc == "Up" else b"1", timeout=seconds)
            await until(lambda call=call: endless.started.is_set() or call.done(), "it has started")  # type: ignore[misc]
            if endless.started.is_set():
                break
        if ending == "cancelled":
            call.cancel()
        await until(partial(counted, metrics, rpc, "CANCELLED"), "it is counted")
    assert calls(metrics, rpc, "OK") == 0


async def test_a_call_that_fails_after_its_caller_hung_up_is_logged(metrics: Metrics) -> None:
    """An operator who disconnects gets no status, so the log has the error, once."""
    started, hung_up = asyncio.Event(), asyncio.Event()

    async def one(request: bytes, context: Any) -> bytes:
        context.add_done_callback(lambda _: hung_up.set())
        started.set()
        await hung_up.wait()
        await asyncio.sleep(0)
        raise KeyError("lost")

    with capture_logs() as logs:
        async with calling(metrics, "fl.v1.Admin", One=one) as caller:
            call = caller.one()
            await started.wait()
            call.cancel()
            await until(lambda: logs, "it is logged")
    assert [(line["event"], line["rpc"], line["error"]) for line in logs] == [("rpc_failed", "One", "KeyError('lost')")]
    assert (calls(metrics, "One", "CANCELLED"), calls(metrics, "One", "INTERNAL")) == (1, 0)


async def test_an_upload_ends_when_its_caller_hangs_up(metrics: Metrics) -> None:
    """A stream of requests has no sender any more."""
    started, ended = asyncio.Event(), asyncio.Event()

    async def up(requests: Any, context: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with calling(metrics, "fl.v1.Coordinator", Up=up) as caller:
        call = caller.up(b"1")
        await started.wait()
        call.cancel()
        await until(ended.is_set, "it ends")


async def test_a_call_without_a_request_is_refused(metrics: Metrics) -> None:
    """The caller closes its side before it sends one."""
    async with calling(metrics, "fl.v1.Coordinator", One=echoed) as caller:
        received = await error_of(caller.channel.stream_unary("/fl.v1.Coordinator/One")(iter(()), timeout=TIMEOUT_S))
    assert (received.code(), received.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "request: expected a request of One, got none",
    )


async def test_a_call_whose_request_does_not_arrive_is_ended(metrics: Metrics) -> None:
    """A call without a request keeps its slot for a limited time."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    policy = echo_policy(metrics, CallLimits(1, 1), stall_s=0.05)
    async with calling(metrics, "fl.v1.Coordinator", policy=policy, One=echoed) as caller:
        received = await error_of(
            caller.channel.stream_unary("/fl.v1.Coordinator/One")(cast(Any, nothing()), timeout=TIMEOUT_S)
        )
        assert (received.code(), received.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "no request came within 0.05 s; try again in 1 s",
        )
        assert await caller.one(b"x") == b"x"


async def test_a_call_over_the_limit_is_refused_before_its_request_arrives(metrics: Metrics) -> None:
    """With a wait, counted, and not logged; the slot is free again when the call ends."""
    free = asyncio.Event()

    async def waiting(request: bytes, context: Any) -> bytes:
        await free.wait()
        return request

    policy = echo_policy(metrics, CallLimits(1, 10))
    async with calling(metrics, "fl.v1.Coordinator", policy=policy, One=waiting) as caller:
        first = asyncio.ensure_future(caller.one(b"a"))
        await until(lambda: policy.limits._open, "it is open")
        with capture_logs() as logs:
            received = await error_of(caller.one(b"b" * 100_000))
        assert received.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_of(received).wait.seconds == 1
        free.set()
        assert await first == b"a"
        await until(lambda: not policy.limits._open, "it is over")
        assert await caller.one(b"c") == b"c"
    assert logs == []
    labels = {"port": "listen", "reason": "calls"}
    assert metrics.registry.get_sample_value("fl_requests_refused_total", labels) == 1


async def test_a_call_without_its_caller_keeps_its_slot_until_it_ends(metrics: Metrics) -> None:
    """It continues, so it counts: a caller must not get more calls by hanging up."""
    started, free = asyncio.Event(), asyncio.Event()

    async def waiting(request: bytes, context: Any) -> bytes:
        started.set()
        await free.wait()
        return request

    policy = echo_policy(metrics, CallLimits(1, 10))
    async with calling(metrics, "fl.v1.Coordinator", policy=policy, One=waiting) as caller:
        first = caller.one(b"a")
        await started.wait()
        first.cancel()
        assert (await error_of(caller.one(b"b"))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        free.set()
        await until(lambda: not policy.limits._open, "it is done")


async def test_a_logged_refusal_has_the_callers_address(metrics: Metrics) -> None:
    """In addition to the certificate's name, so that an operator finds the device."""
    with capture_logs() as logs:
        async with calling(metrics, "fl.v1.Coordinator", **failing_methods(errors.NoSuchRun("r"))) as caller:
            await error_of(caller.one())
    assert logs[0]["peer"].startswith("127.0.0.1:")


async def echoed(request: bytes, context: Any) -> bytes:
    """Return the request."""
    return request
