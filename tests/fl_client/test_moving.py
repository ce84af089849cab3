"""A daemon whose certificates are renewed moves to a new connection: nothing is missed, and nothing is done twice."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from fl_client import app
from fl_client.attendance import Door
from fl_client.transport import GrpcTransport
from protos.fl.v1 import errors_pb2, training_pb2
from tests.fl_client.conftest import key


@pytest.fixture
def block(fleet):
    """Training stands still until it is set, at the latest when the test is over."""
    fleet.task.block = threading.Event()
    yield fleet.task.block
    fleet.task.block.set()


@pytest.fixture
def logs():
    """The lines that are logged."""
    with capture_logs() as lines:
        yield lines


def logged(lines, event):
    """Whether an event was."""
    return any(line["event"] == event for line in lines)


@pytest.fixture
def door(coordinator, monkeypatch):
    """The daemon's way in: `renew()` renews, `open()` is how many connections are open, `ports` where the next go.

    Events of the first connection come while `late` is set.
    """
    state = SimpleNamespace(reason=asyncio.Event(), connections=[], ports=[], late=asyncio.Event())
    state.late.set()

    class Counted(GrpcTransport):
        closed = False

        async def attend(self, session_id):
            async for event in super().attend(session_id):
                if self is state.connections[0]:
                    await state.late.wait()
                yield event

        async def close(self):
            self.closed = True
            await super().close()

    def connect():
        port = state.ports.pop(0) if state.ports else coordinator.port
        state.connections.append(Counted(f"127.0.0.1:{port}"))
        return state.connections[-1]

    async def renewed():
        await state.reason.wait()
        state.reason.clear()

    state.renew = state.reason.set
    state.open = lambda: sum(not connection.closed for connection in state.connections)
    monkeypatch.setattr(app, "_door", lambda *_: Door("here", connect, renewed))
    return state


async def test_the_session_moves_in_mid_training(fleet, coordinator, door, block):
    """Three moves: one registration, one training, one upload, and every old connection is closed."""
    async with fleet.daemon() as running:
        coordinator.assign(coordinator.assignment())
        await running.until(fleet.task.started.is_set)
        for moves in range(1, 4):
            door.renew()
            await coordinator.until(lambda moves=moves: len(coordinator.calls["Attend"]) == 1 + moves)
            await running.until(lambda: door.open() == 1)
        block.set()
        await coordinator.until(lambda: coordinator.updates)
        assert running.count("attached") == 1
    assert (len(coordinator.calls["Register"]), fleet.task.steps, len(coordinator.calls["SubmitUpdate"])) == (1, 1, 1)
    assert {request.session_id for request in coordinator.calls["Attend"]} == {"s1"}


async def test_an_upload_ends_where_it_began(fleet, coordinator, door, logs):
    """The old connection is kept for as long as the upload needs it, and closed then."""
    goes_on, submit = asyncio.Event(), coordinator._note

    async def note(method, request):
        await submit(method, request)
        if method == "SubmitUpdate":
            await goes_on.wait()

    coordinator._note = note
    async with fleet.daemon() as running:
        coordinator.assign(coordinator.assignment())
        await coordinator.until(lambda: coordinator.calls["SubmitUpdate"])
        door.renew()
        await running.until(lambda: logged(logs, "moved"))
        await asyncio.sleep(0.05)  # a daemon that does not wait would close the old connection now
        assert door.open() == 2
        goes_on.set()
        await coordinator.until(lambda: coordinator.updates)
        await running.until(lambda: door.open() == 1)
        assert not door.connections[1].closed
    assert (len(coordinator.calls["SubmitUpdate"]), len(coordinator.calls["Register"])) == (1, 1)


async def test_what_was_pushed_before_the_move_is_heard(fleet, coordinator, door, logs, block):
    """A cancel is late on the old stream: the daemon does not leave that before it has ended."""
    async with fleet.daemon() as running:
        coordinator.assign(coordinator.assignment())
        await running.until(fleet.task.started.is_set)
        coordinator.outstanding.clear()
        door.late.clear()
        coordinator.push(cancel={"key": key(0), "reason": training_pb2.REFUSAL_REASON_NOT_NEEDED})
        door.renew()
        await coordinator.until(lambda: len(coordinator.calls["Attend"]) == 2)
        await asyncio.sleep(0.05)  # a daemon that does not wait would close the old stream now
        door.late.set()
        await running.until(lambda: logged(logs, "cancelled"))
        block.set()


async def test_a_certificate_that_is_not_accepted_costs_nothing(fleet, coordinator, door, unused_tcp_port):
    """The earlier connection is kept, and the move is tried again until it succeeds."""
    async with fleet.daemon() as running:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        door.ports[:] = [unused_tcp_port, unused_tcp_port]
        door.renew()
        await coordinator.until(lambda: len(coordinator.calls["Attend"]) == 2)
        await running.until(lambda: door.open() == 1)
        assert (running.count("attached"), running.count("connection_attempts_total", result="failed")) == (1, 0)
    assert (len(door.connections), len(coordinator.calls["Register"])) == (4, 1)


async def test_a_session_that_the_coordinator_lost_is_made_anew(fleet, coordinator, door):
    """It says so to the new connection: then both are left, and the daemon registers as it always does."""
    async with fleet.daemon() as running:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.faults["Attend"].append(errors_pb2.UnknownSession())
        door.renew()
        await coordinator.until(lambda: len(coordinator.calls["Register"]) == 2)
        await running.until(lambda: door.open() == 1)


async def test_after_a_restart_of_the_coordinator_one_connection_is_enough(fleet, coordinator, door):
    """It does not know the session any more: the daemon registers where it was told so, and attends there."""
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.faults["Attend"].append(errors_pb2.UnknownSession())
        coordinator.hang_up()
        await coordinator.until(lambda: len(coordinator.calls["Register"]) == 2)
        await coordinator.until(lambda: len(coordinator.calls["Attend"]) == 2)
    assert (len(door.connections), len(coordinator.calls["Register"])) == (2, 2)


async def test_a_session_that_is_lost_is_not_asked_for_again(fleet, coordinator, door):
    """After a restart the coordinator's door is full: who comes again only registers."""
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.faults["Attend"].append(errors_pb2.UnknownSession())
        coordinator.faults["Register"].append(errors_pb2.RetryLater())
        coordinator.hang_up()
        await coordinator.until(lambda: len(coordinator.calls["Attend"]) == 2)
    assert (len(door.connections), len(coordinator.calls["Register"])) == (3, 3), "one of three was refused"
