"""Operators' actions on clients: they hold until they are undone, over registrations and restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fl_server.errors import Forbidden, InvalidInput, NoSuchClient
from fl_server.store.errors import StoreUnavailable
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.fleet_checks import eligible, history, make_ledger_unavailable
from tests.fl_server.harness import World, until


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def test_an_action_that_cannot_be_written_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ban that is not in the ledger would not hold after a restart."""
    a = await Device("a").connect(world)
    with monkeypatch.context() as patch:
        make_ledger_unavailable(patch, world)
        with pytest.raises(StoreUnavailable):
            await world.operators.ban("a", "smoke", "admin")
        with pytest.raises(StoreUnavailable):
            await world.operators.ban("b", "smoke", "admin")
    assert (world.fleet.records.get("a").banned, eligible(world)) == (False, ("a",))
    with pytest.raises(NoSuchClient):
        world.fleet.records.get("b")
    assert a.stream is not None
    assert not a.stream.done()


async def test_a_ban_holds_until_it_is_undone(world: World) -> None:
    """The stream ends with the reason, a registration is refused with it, and the ledger keeps it."""
    a = await Device("a").connect(world)
    await world.operators.ban("a", "smoke", "admin:eve")
    with pytest.raises(Forbidden, match="to be unbanned .banned: smoke"):
        await a.stream
    with pytest.raises(Forbidden, match="banned: smoke"):
        await a.connect(world)
    assert (world.fleet.attendance.roster.present(), world.store.clients()[0].banned) == ((), True)
    await world.operators.unban("a", "admin:eve")
    await a.connect(world)
    assert eligible(world) == ("a",)
    assert history(world) == ["client_registered", "client_banned", "client_unbanned", "client_back"]


async def test_a_client_can_be_banned_before_it_registers(world: World) -> None:
    """By any valid id."""
    await world.operators.ban("a", "", "admin")
    with pytest.raises(Forbidden, match="banned: no reason given"):
        await Device("a").connect(world)
    with pytest.raises(InvalidInput, match="client_id: expected 1 to 64"):
        await world.operators.ban("a/b", "", "admin")


async def test_a_draining_client_gets_no_new_work(world: World) -> None:
    """It gets a notice, stays connected, and is eligible again once the drain is undone."""
    a = await Device("a").connect(world)
    await world.operators.drain("a", "move", undo=False, actor="admin")
    await until(lambda: a.pushed("drain"), "it gets the drain")
    assert (eligible(world), world.fleet.attendance.state("a"), world.fleet.records.get("a").note) == (
        (),
        "present",
        "move",
    )
    await world.operators.drain("a", "", undo=True, actor="admin")
    assert (eligible(world), world.fleet.records.get("a").note) == (("a",), "")


async def test_a_forgotten_client_is_removed(world: World) -> None:
    """Also from the ledger; it may register again."""
    a = await Device("a").connect(world)
    await world.operators.forget("a", "admin")
    with pytest.raises(Forbidden, match="to register again: it was forgotten here"):
        await a.stream
    with pytest.raises(NoSuchClient, match="no client 'a' has registered"):
        world.fleet.records.get("a")
    assert (world.store.clients(), world.fleet.attendance.roster.present()) == ([], ())
    await a.connect(world)
    assert eligible(world) == ("a",)


@pytest.mark.parametrize("operation", ["unban", "forget", "drain"])
async def test_actions_need_a_known_client(world: World, operation: str) -> None:
    """A mistyped id is an error."""
    arguments = {"drain": ("x", "", False, "admin")}.get(operation, ("x", "admin"))
    with pytest.raises(NoSuchClient, match="no client 'x' has registered"):
        await getattr(world.operators, operation)(*arguments)


async def test_actions_hold_over_a_registration(world: World) -> None:
    """Drain and notes stay; the client's own values are replaced."""
    a = await Device("a").connect(world)
    await world.operators.drain("a", "move", undo=False, actor="admin")
    a.labels = {"site": "south"}
    await a.connect(world)
    record = world.fleet.records.get("a")
    assert (record.draining, record.note, record.labels) == (True, "move", {"site": "south"})


async def test_actions_hold_over_a_restart(tmp_path: Path) -> None:
    """Bans, drains, removals and their undoing hold, each with its row of history."""
    async with World(tmp_path) as world:
        for name in ("banned", "drained", "forgotten", "free"):
            await Device(name).connect(world)
        await world.operators.ban("banned", "smoke", "admin:eve")
        await world.operators.drain("drained", "move", undo=False, actor="admin:eve")
        await world.operators.forget("forgotten", "admin:eve")
        await world.operators.ban("free", "a mistake", "admin:eve")
        await world.operators.unban("free", "admin:eve")
        await world.operators.drain("free", "a mistake", undo=False, actor="admin:eve")
        await world.operators.drain("free", "", undo=True, actor="admin:eve")
    async with World(tmp_path) as world:
        for name in ("drained", "free"):
            await Device(name).connect(world)
        with pytest.raises(Forbidden, match="banned: smoke"):
            await Device("banned").connect(world)
        assert (eligible(world), world.fleet.records.get("drained").note) == (("free",), "move")
        assert [record.client_id for record in await world.fleet.records.all()] == ["banned", "drained", "free"]
        assert {name: history(world, name)[1:] for name in ("banned", "drained", "forgotten", "free")} == {
            "banned": ["client_banned"],
            "drained": ["client_drained"],
            "forgotten": ["client_forgotten"],
            "free": ["client_banned", "client_unbanned", "client_drained", "client_undrained", "client_back"],
        }


async def test_a_forgotten_clients_availability_is_removed(world: World) -> None:
    """Its reports are removed with it."""
    a = await Device("a").connect(world)
    no = pb.Availability(may_train=False)
    await world.service.ReportStatus(pb.ReportStatusRequest(session_id=a.session, availability=no), NO_CONTEXT)
    await world.operators.forget("a", "admin")
    assert world.fleet.eligibility.availability("a").may_train
