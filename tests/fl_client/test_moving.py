"""Renewed certificates move a daemon to a new connection: no event is missed, and no work is done twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from fl_client import app
from fl_client.connection.transport import GrpcTransport
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, training_pb2
from tests.fl_client.fake_coordinator import FakeCoordinator, key
from tests.fl_client.fleet import Fleet


@pytest.fixture
def block(fleet: Fleet) -> Iterator[threading.Event]:
    """Training waits until this event is set, at the latest at the end of the test."""
    fleet.task.block = threading.Event()
    yield fleet.task.block
    fleet.task.block.set()


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """The logged lines."""
    with capture_logs() as lines:
        yield lines


def logged(lines: list[EventDict], event: str) -> bool:
    """Whether an event was logged."""
    return any(line["event"] == event for line in lines)


@pytest.fixture
def endpoint(coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The daemon's endpoint: `renew()` renews, `open()` is the number of open connections, `ports` has the next ports.

    Events of the first connection pass while `late` is set.
    """
    state = SimpleNamespace(reason=asyncio.Event(), connections=[], ports=[], late=asyncio.Event())
    state.late.set()

    class Counted(GrpcTransport):
        closed = False

        async def attend(self, session_id: str, asked: pb.AttendRequest) -> AsyncGenerator[pb.AttendResponse, None]:
            async for event in super().attend(session_id, asked):
                if self is state.connections[0]:
                    await state.late.wait()
                yield event

        async def close(self) -> None:
            self.closed = True
            await super().close()

    class Moving(app.DaemonEndpoint):
        def connect(self) -> GrpcTransport:
            port = state.ports.pop(0) if state.ports else coordinator.port
            connection = Counted(f"127.0.0.1:{port}")
            state.connections.append(connection)
            return connection

        async def renewed(self) -> None:
            await state.reason.wait()
            state.reason.clear()

    state.renew = state.reason.set
    state.open = lambda: sum(not connection.closed for connection in state.connections)
    monkeypatch.setattr(app, "DaemonEndpoint", Moving)
    return state


async def test_the_session_moves_in_mid_training(
    fleet: Fleet, coordinator: FakeCoordinator, endpoint: SimpleNamespace, block: threading.Event
) -> None:
    """Three moves: one registration, one training, one upload, and every old connection is closed."""
    async with fleet.daemon() as running:
        coordinator.assign(coordinator.assignment())
        await running.until(fleet.task.started.is_set)
        for moves in range(1, 4):
            endpoint.renew()
            await coordinator.until_called("Attend", 1 + moves)
            await running.until(lambda: endpoint.open() == 1)
        block.set()
        await coordinator.until(lambda: coordinator.updates)
        assert running.count("attached") == 1
    assert (len(coordinator.calls["Register"]), fleet.task.steps, len(coordinator.calls["SubmitUpdate"])) == (1, 1, 1)
    assert {request.session_id for request in coordinator.calls["Attend"]} == {"s1"}


async def test_an_upload_ends_where_it_began(
    fleet: Fleet,
    coordinator: FakeCoordinator,
    endpoint: SimpleNamespace,
    logs: list[EventDict],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old connection is kept until the end of the upload and then closed."""
    goes_on, submit = asyncio.Event(), coordinator._note

    async def note(method: str, request: Any) -> None:
        await submit(method, request)
        if method == "SubmitUpdate":
            await goes_on.wait()

    monkeypatch.setattr(coordinator, "_note", note)
    async with fleet.daemon() as running:
        coordinator.assign(coordinator.assignment())
        await coordinator.until(lambda: coordinator.calls["SubmitUpdate"])
        endpoint.renew()
        await running.until(lambda: logged(logs, "moved"))
        # A daemon that does not wait would close the old connection before it handles an event of the new one.
        coordinator.push(cancel={"key": key(9), "reason": training_pb2.REFUSAL_REASON_NOT_NEEDED})
        await running.until(lambda: logged(logs, "cancelled"))
        assert endpoint.open() == 2
        goes_on.set()
        await coordinator.until(lambda: coordinator.updates)
        await running.until(lambda: endpoint.open() == 1)
        assert not endpoint.connections[1].closed
    assert (len(coordinator.calls["SubmitUpdate"]), len(coordinator.calls["Register"])) == (1, 1)


async def test_events_before_the_move_are_handled(
    fleet: Fleet, coordinator: FakeCoordinator, endpoint: SimpleNamespace, logs: list[EventDict], block: threading.Event
) -> None:
    """A cancel arrives late on the old stream. The daemon keeps that stream until it ends."""
    async with fleet.daemon() as running:
        coordinator.assign(coordinator.assignment())
        await running.until(fleet.task.started.is_set)
        coordinator.outstanding.clear()
        endpoint.late.clear()
        coordinator.push(cancel={"key": key(0), "reason": training_pb2.REFUSAL_REASON_NOT_NEEDED})
        endpoint.renew()
        await coordinator.until(lambda: len(coordinator.calls["Attend"]) == 2)
        await asyncio.sleep(0.05)  # a daemon that does not wait would close the old stream now
        endpoint.late.set()
        await running.until(lambda: logged(logs, "cancelled"))
        block.set()


async def test_a_certificate_that_is_not_accepted_costs_nothing(
    fleet: Fleet, coordinator: FakeCoordinator, endpoint: SimpleNamespace, unused_tcp_port: int
) -> None:
    """The earlier connection is kept, and the move is tried again until it succeeds."""
    async with fleet.daemon() as running:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        endpoint.ports[:] = [unused_tcp_port, unused_tcp_port]
        endpoint.renew()
        await coordinator.until(lambda: len(coordinator.calls["Attend"]) == 2)
        await running.until(lambda: endpoint.open() == 1)
        assert (running.count("attached"), running.count("connection_attempts_total", result="failed")) == (1, 0)
    assert (len(endpoint.connections), len(coordinator.calls["Register"])) == (4, 1)


async def test_a_lost_session_is_replaced(
    fleet: Fleet, coordinator: FakeCoordinator, endpoint: SimpleNamespace
) -> None:
    """The new connection gets that error: the daemon closes both, and registers again."""
    async with fleet.daemon() as running:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.faults["Attend"].append(errors_pb2.UnknownSession())
        endpoint.renew()
        await coordinator.until(lambda: len(coordinator.calls["Register"]) == 2)
        await running.until(lambda: endpoint.open() == 1)


async def test_after_a_restart_of_the_coordinator_one_connection_is_enough(
    fleet: Fleet, coordinator: FakeCoordinator, endpoint: SimpleNamespace
) -> None:
    """It no longer knows the session: the daemon registers and attends on the same connection."""
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.faults["Attend"].append(errors_pb2.UnknownSession())
        coordinator.hang_up()
        await coordinator.until(lambda: len(coordinator.calls["Register"]) == 2)
        await coordinator.until(lambda: len(coordinator.calls["Attend"]) == 2)
    assert (len(endpoint.connections), len(coordinator.calls["Register"])) == (2, 2)


async def test_a_session_that_is_lost_is_not_asked_for_again(
    fleet: Fleet, coordinator: FakeCoordinator, endpoint: SimpleNamespace
) -> None:
    """After a restart the coordinator defers registrations: the next try only registers."""
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.faults["Attend"].append(errors_pb2.UnknownSession())
        coordinator.faults["Register"].append(errors_pb2.RetryLater())
        coordinator.hang_up()
        await coordinator.until(lambda: len(coordinator.calls["Attend"]) == 2)
    assert (len(endpoint.connections), len(coordinator.calls["Register"])) == (3, 3), "one of three was refused"
