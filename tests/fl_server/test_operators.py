"""What operators say of clients: it holds until it is undone, over registrations and restarts."""

from __future__ import annotations

import pytest

from fl_server.errors import Forbidden, InvalidInput, NoSuchClient
from fl_server.store.base import StoreAway
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import Device
from tests.fl_server.fleet_looks import eligible, history, without_a_ledger
from tests.fl_server.harness import World, until


@pytest.fixture
async def world(tmp_path):
    """A coordinator without clients."""
    async with World(tmp_path) as world:
        yield world


async def test_what_an_operator_said_holds_or_is_refused(world, monkeypatch):
    """A ban that cannot be written is none: after a restart it would not hold."""
    a = await Device("a").come(world)
    with monkeypatch.context() as patch:
        without_a_ledger(patch, world)
        with pytest.raises(StoreAway):
            await world.operators.ban("a", "smoke", "admin")
        with pytest.raises(StoreAway):
            await world.operators.ban("b", "smoke", "admin")
    assert (world.fleet.record("a").banned, eligible(world)) == (False, ("a",))
    with pytest.raises(NoSuchClient):
        world.fleet.record("b")
    assert a.stream is not None
    assert not a.stream.done()


async def test_a_ban_holds_until_it_is_undone(world):
    """The stream ends with the reason, registering is refused with it, and the ledger remembers."""
    a = await Device("a").come(world)
    await world.operators.ban("a", "smoke", "admin:eve")
    with pytest.raises(Forbidden, match="to be unbanned .banned: smoke"):
        await a.stream
    with pytest.raises(Forbidden, match="banned: smoke"):
        await a.come(world)
    assert (world.fleet.present(), world.store.clients()[0].banned) == ((), True)
    await world.operators.unban("a", "admin:eve")
    await a.come(world)
    assert eligible(world) == ("a",)
    assert history(world) == ["client_registered", "client_banned", "client_unbanned", "client_back"]


async def test_a_client_can_be_banned_before_it_comes(world):
    """By an id that it could have."""
    await world.operators.ban("a", "", "admin")
    with pytest.raises(Forbidden, match="banned: no reason given"):
        await Device("a").come(world)
    with pytest.raises(InvalidInput, match="client_id: expected 1 to 64"):
        await world.operators.ban("a/b", "", "admin")


async def test_a_draining_client_gets_nothing_new(world):
    """It is told, stays connected, and comes back into the draw when that is undone."""
    a = await Device("a").come(world)
    await world.operators.drain("a", "move", undo=False, actor="admin")
    await until(lambda: a.told("drain"), "it is told")
    assert (eligible(world), world.fleet.state("a"), world.fleet.record("a").note) == ((), "present", "move")
    await world.operators.drain("a", "", undo=True, actor="admin")
    assert (eligible(world), world.fleet.record("a").note) == (("a",), "")


async def test_a_forgotten_client_is_gone(world):
    """From the ledger too; it may register anew."""
    a = await Device("a").come(world)
    await world.operators.forget("a", "admin")
    with pytest.raises(Forbidden, match="to register again: it was forgotten here"):
        await a.stream
    with pytest.raises(NoSuchClient, match="no client 'a' has registered"):
        world.fleet.record("a")
    assert (world.store.clients(), world.fleet.present()) == ([], ())
    await a.come(world)
    assert eligible(world) == ("a",)


@pytest.mark.parametrize("operation", ["unban", "forget", "drain"])
async def test_operations_need_a_client_that_is_known(world, operation):
    """A typing mistake is told."""
    arguments = {"drain": ("x", "", False, "admin")}.get(operation, ("x", "admin"))
    with pytest.raises(NoSuchClient, match="no client 'x' has registered"):
        await getattr(world.operators, operation)(*arguments)


async def test_what_operators_said_survives_a_registration(world):
    """Draining and notes stay; what the client says of itself is new."""
    a = await Device("a").come(world)
    await world.operators.drain("a", "move", undo=False, actor="admin")
    a.labels = {"site": "south"}
    await a.come(world)
    record = world.fleet.record("a")
    assert (record.draining, record.note, record.labels) == (True, "move", {"site": "south"})


async def test_what_operators_said_holds_over_a_restart(tmp_path):
    """Banned, drained and forgotten stay so, each with its line of history, and so does what was undone."""
    async with World(tmp_path) as world:
        for name in ("banned", "drained", "forgotten", "free"):
            await Device(name).come(world)
        await world.operators.ban("banned", "smoke", "admin:eve")
        await world.operators.drain("drained", "move", undo=False, actor="admin:eve")
        await world.operators.forget("forgotten", "admin:eve")
        await world.operators.ban("free", "a mistake", "admin:eve")
        await world.operators.unban("free", "admin:eve")
        await world.operators.drain("free", "a mistake", undo=False, actor="admin:eve")
        await world.operators.drain("free", "", undo=True, actor="admin:eve")
    async with World(tmp_path) as world:
        for name in ("drained", "free"):
            await Device(name).come(world)
        with pytest.raises(Forbidden, match="banned: smoke"):
            await Device("banned").come(world)
        assert (eligible(world), world.fleet.record("drained").note) == (("free",), "move")
        assert [record.client_id for record in await world.fleet.records()] == ["banned", "drained", "free"]
        assert {name: history(world, name)[1:] for name in ("banned", "drained", "forgotten", "free")} == {
            "banned": ["client_banned"],
            "drained": ["client_drained"],
            "forgotten": ["client_forgotten"],
            "free": ["client_banned", "client_unbanned", "client_drained", "client_undrained", "client_back"],
        }


async def test_a_forgotten_client_said_nothing(world):
    """What it said of itself goes with it."""
    a = await Device("a").come(world)
    no = pb.Availability(may_train=False)
    await world.service.ReportStatus(pb.ReportStatusRequest(session_id=a.session, availability=no), None)
    await world.operators.forget("a", "admin")
    assert world.fleet.workforce.availability("a").may_train
