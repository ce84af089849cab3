"""Two daemons under one identity: who works is served, who was reset comes back, and what goes on is seen."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from fl_server.clients import duels as duels_module
from fl_server.clients.details import client_details
from fl_server.clients.duels import FIRST_WAIT_S, FLAPPING_S, LONGEST_WAIT_S, PATIENT_S, QUIET_S, Contest
from fl_server.errors import Contested, Fenced, Forbidden
from fl_server.identity import address
from fl_server.sessions import Origin
from tests.fl_server.devices import Device
from tests.fl_server.fleet_looks import history
from tests.fl_server.harness import World, until


class Copy(Device):
    """A device of another daemon's identity: the same name, and a process of its own."""

    instance = "copy"

    def registration(self, **changes):
        return super().registration(**{"instance_id": self.instance, **changes})


@pytest.fixture
async def world(tmp_path, monkeypatch):
    """A coordinator that keeps newcomers waiting for as long as a test says."""
    monkeypatch.setattr(duels_module, "HOLD_S", 0.05)
    async with World(tmp_path) as world:
        yield world


async def worked(world, *names):
    """Devices that have delivered an update each."""
    devices = [await Device(name).come(world) for name in names]
    await world.create(stop={"rounds": 1})
    await world.completed()
    return devices


async def test_who_has_worked_is_not_evicted(world):
    """The copy is refused with a wait; the working one goes on, is told, and history, log and metrics have it."""
    a, _ = await worked(world, "a", "b")
    token = address.set("192.0.2.7:5000")
    with capture_logs() as logs, pytest.raises(Contested, match="another daemon is at work as 'a': end one") as refused:
        await Copy("a").come(world)
    address.reset(token)
    assert refused.value.detail.wait.ToTimedelta().total_seconds() == FIRST_WAIT_S
    assert world.fleet.session(a.session).stream is not None
    await until(lambda: any("or its key was copied" in notice.text for notice in a.told("notice")), "it is told")
    (line,) = [line for line in logs if line["event"] == "client_contested"]
    assert (line["at_work"], line["refused"], line["address_refused"]) == ("start of a", "copy", "192.0.2.7:5000")
    await until(lambda: history(world)[-1] == "client_contested", "it is in the history")
    assert world.metric("fl_identity_conflicts_total", outcome="refused") == 1
    assert world.fleet.known("a").instance_id == "start of a"


async def test_who_is_at_work_is_not_evicted(world):
    """Before its first update was admitted, an assignment that is not answered speaks for it."""
    idle, a = Device("a", works=False), Device("b", works=False)
    for device in (idle, a):
        await device.come(world)
    await world.create(stop={"rounds": 1})
    await a.assigned()
    with pytest.raises(Contested):
        await Copy("b").come(world)


async def test_without_work_the_newer_one_stays(world):
    """Neither is proven: the older one is fenced, as always."""
    first = await Device("a").come(world)
    with capture_logs() as logs:
        await Copy("a").come(world)
    with pytest.raises(Fenced):
        await first.stream
    assert [line["older"] for line in logs if line["event"] == "client_fenced"] == ["start of a"]
    assert world.metric("fl_identity_conflicts_total", outcome="fenced") == 1


async def test_the_same_daemon_comes_back_at_once(world):
    """A new connection of the same process is no conflict, whatever the older stream looks like."""
    a, _ = await worked(world, "a", "b")
    await a.come(world)
    assert world.fleet.duels.contest_of("a") is None


async def test_a_restarted_daemon_whose_stream_has_ended_comes_back_at_once(world):
    """The old process closed its connection, or the kernel did for it."""
    a, _ = await worked(world, "a", "b")
    await a.leave()
    await Copy("a").come(world)
    assert world.fleet.duels.contest_of("a") is None


async def test_a_newcomer_gets_in_when_the_older_stream_is_found_dead(world, monkeypatch):
    """It waits in its call for that, and needs no second one."""
    monkeypatch.setattr(duels_module, "HOLD_S", 20.0)
    a, _ = await worked(world, "a", "b")
    coming = asyncio.ensure_future(Copy("a").come(world))
    await until(lambda: a.told("notice"), "the older one is asked for a sign of life")
    assert not coming.done()
    with pytest.raises(Contested):  # a third does not wait beside the second
        await Copy("a").come(world)
    await a.leave()
    await coming
    assert world.fleet.attached("a")


async def test_who_worked_last_takes_its_place_back(world):
    """A copy that slipped in while the link was cut goes when the working daemon is back, even from an assignment."""
    a, _ = await worked(world, "a", "b")
    await a.leave()
    copy = Copy("a", works=False)
    await copy.come(world)
    await world.create(name="second", stop={"rounds": 1})
    await copy.assigned()
    await a.come(world)
    with pytest.raises(Fenced):
        await copy.stream
    await world.completed("second")


async def test_who_worked_is_known_after_a_restart(tmp_path, monkeypatch):
    """A copy that is quicker than the daemon after a restart of the coordinator has to go."""
    monkeypatch.setattr(duels_module, "HOLD_S", 0.05)
    async with World(tmp_path) as world:
        await worked(world, "a", "b")
    async with World(tmp_path) as world:
        copy = await Copy("a").come(world)
        await Device("a").come(world)
        with pytest.raises(Fenced):
            await copy.stream


def test_the_waits_grow_behind_a_minute():
    """Short as long as a reset machine's stream may be undetected; each newcomer has its own; four are remembered."""
    contest = Contest(0.0, 0.0)
    copy = Origin("copy")
    assert {contest.wait_s(copy, at) for at in (0.0, 30.0, PATIENT_S - 1)} == {FIRST_WAIT_S}
    assert [contest.wait_s(copy, PATIENT_S) for _ in range(3)] == [4.0, 8.0, 16.0]
    assert max(contest.wait_s(copy, PATIENT_S) for _ in range(100)) == LONGEST_WAIT_S
    assert contest.wait_s(Origin("reset"), PATIENT_S) == FIRST_WAIT_S
    for number in range(100):
        contest.wait_s(Origin(str(number)), PATIENT_S)
    assert len(contest.rivals) == 4


async def test_a_fight_that_goes_on_raises_the_gauge(world, monkeypatch):
    """Two minutes after its beginning, until nothing was heard of it for a quarter of an hour."""
    now = [1000.0]
    await worked(world, "a", "b")
    monkeypatch.setattr(duels_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(duels_module, "HOLD_S", 0.0)
    for pause, flapping in ((0.0, 0), (FLAPPING_S - 1, 0), (1.0, 1)):
        now[0] += pause
        with pytest.raises(Contested):
            await Copy("a").come(world)
        assert world.metric("fl_clients_contested") == flapping
    now[0] += QUIET_S
    assert world.metric("fl_clients_contested") == 0
    with pytest.raises(Contested):
        await Copy("a").come(world)
    assert world.fleet.duels.contest_of("a").conflicts == 1


async def test_what_an_operator_sees_of_it(world):
    """Both daemons, where they are, and how often they met."""
    await worked(world, "a", "b")
    token = address.set("192.0.2.7:5000")
    with pytest.raises(Contested):
        await Copy("a").come(world)
    address.reset(token)
    shown = client_details(world.fleet, world.fleet.record("a"), world.store.history("a"))
    assert (shown.session.instance_id, shown.refused.instance_id) == ("start of a", "copy")
    assert (shown.refused.address, shown.conflicts, shown.contested) == ("192.0.2.7:5000", 1, False)
    assert not shown.HasField("fenced")
    assert shown.client.client_id == "a"


async def test_a_forgotten_client_is_new(world):
    """Nothing is known of who worked, or of whom it fought with."""
    await worked(world, "a", "b")
    with pytest.raises(Contested):
        await Copy("a").come(world)
    await world.operators.forget("a", "admin")
    await Copy("a").come(world)
    assert world.fleet.duels.contest_of("a") is None


async def test_many_registrations_are_a_few_lines_of_history(world):
    """The first five of a minute are written, the others counted in one line when it is over."""
    for _ in range(60):
        await world.service.Register(Device("a").registration(), None)
    assert history(world) == ["client_registered", *["client_back"] * 5]
    world.fleet._lines._folding._window_s = 0.0
    world.fleet._lines._ended()
    await until(lambda: len(history(world)) == 7, "the sum is written")
    assert world.store.history("a")[-1].detail.startswith("54 times more within a minute, the last one: start of a")


async def test_what_banned_clients_leave(world):
    """Forgotten, it is still refused, with the reason; unbanned, it is a new client."""
    a = await Device("a").come(world)
    await world.operators.ban("a", "it lies", "admin")
    assert await world.operators.forget("a", "admin") is True
    for _ in range(2):
        with pytest.raises(Forbidden, match="banned: it lies"):
            await Device("a").come(world)
    await world.operators.unban("a", "admin")
    await a.come(world)
    assert world.fleet.known("a").tasks
    assert await world.operators.forget("a", "admin") is False


async def test_a_ban_that_was_forgotten_outlives_a_restart(tmp_path):
    """The ledger has it, with the reason."""
    async with World(tmp_path) as world:
        await Device("a").come(world)
        await world.operators.ban("a", "it lies", "admin")
        await world.operators.forget("a", "admin")
    async with World(tmp_path) as world:
        with pytest.raises(Forbidden, match="banned: it lies"):
            await Device("a").come(world)
        assert world.fleet.present() == ()
