"""Two daemons under one identity: the working one is served, a restarted one returns, and operators see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from fl_server.clients import contested_identities as module
from fl_server.clients.contested_identities import (
    FIRST_WAIT_S,
    FLAPPING_S,
    LONGEST_WAIT_S,
    QUIET_S,
    SHORT_WAITS_S,
    Contest,
)
from fl_server.clients.sessions import Origin
from fl_server.errors import Contested, Fenced, Forbidden
from fl_server.identity import address
from fl_server.rpc.clients import client_details
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.fleet_checks import history
from tests.fl_server.harness import World, until


class Copy(Device):
    """A device with another daemon's identity: the same name, but its own process."""

    instance = "copy"

    def registration(self, **changes: Any) -> pb.RegisterRequest:
        return super().registration(**{"instance_id": self.instance, **changes})


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A coordinator that makes newcomers wait as long as the test sets."""
    monkeypatch.setattr(module, "HOLD_S", 0.05)
    async with World(tmp_path) as world:
        yield world


async def devices_that_delivered(world: World, *names: str) -> list[Device]:
    """Devices that have delivered an update each."""
    devices = [await Device(name).connect(world) for name in names]
    await world.create(stop={"rounds": 1})
    await world.completed()
    return devices


async def test_a_daemon_that_delivered_is_not_evicted(world: World) -> None:
    """The copy is refused with a wait; the working one stays and gets a notice; history, log and metrics have it."""
    a, _ = await devices_that_delivered(world, "a", "b")
    token = address.set("192.0.2.7:5000")
    with capture_logs() as logs, pytest.raises(Contested, match="another daemon is at work as 'a': end one") as refused:
        await Copy("a").connect(world)
    address.reset(token)
    assert refused.value.detail.wait.ToTimedelta().total_seconds() == FIRST_WAIT_S
    assert world.fleet.sessions.of_call(a.session).stream is not None
    await until(
        lambda: any("or its key was copied" in notice.text for notice in a.pushed("notice")), "it gets a notice"
    )
    (line,) = [line for line in logs if line["event"] == "client_contested"]
    assert (line["at_work"], line["refused"], line["address_refused"]) == ("start of a", "copy", "192.0.2.7:5000")
    await until(lambda: history(world)[-1] == "client_contested", "it is in the history")
    assert world.metric("fl_identity_conflicts_total", outcome="refused") == 1
    assert world.fleet.records.get("a").instance_id == "start of a"


async def test_a_daemon_with_an_open_assignment_is_not_evicted(world: World) -> None:
    """An open assignment is enough before its first update was admitted."""
    idle, a = Device("a", works=False), Device("b", works=False)
    for device in (idle, a):
        await device.connect(world)
    await world.create(stop={"rounds": 1})
    await a.assigned()
    with pytest.raises(Contested):
        await Copy("b").connect(world)


async def test_without_work_the_newer_daemon_stays(world: World) -> None:
    """Neither has worked: the older one is fenced."""
    first = await Device("a").connect(world)
    with capture_logs() as logs:
        await Copy("a").connect(world)
    with pytest.raises(Fenced):
        await first.stream
    assert [line["older"] for line in logs if line["event"] == "client_fenced"] == ["start of a"]
    assert world.metric("fl_identity_conflicts_total", outcome="fenced") == 1


async def test_the_same_daemon_reconnects_at_once(world: World) -> None:
    """A new connection of the same process is no conflict, in any state of the older stream."""
    a, _ = await devices_that_delivered(world, "a", "b")
    await a.connect(world)
    assert world.fleet.contested.contest_of("a") is None


async def test_a_restarted_daemon_with_an_ended_stream_reconnects_at_once(world: World) -> None:
    """The old process or its kernel closed the connection."""
    a, _ = await devices_that_delivered(world, "a", "b")
    await a.leave()
    await Copy("a").connect(world)
    assert world.fleet.contested.contest_of("a") is None


async def test_a_newcomer_is_admitted_once_the_older_stream_is_dead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in its call and needs no second one."""
    monkeypatch.setattr(module, "HOLD_S", 20.0)
    a, _ = await devices_that_delivered(world, "a", "b")
    newcomer = asyncio.ensure_future(Copy("a").connect(world))
    await until(lambda: a.pushed("notice"), "the older one gets a notice")
    assert not newcomer.done()
    with pytest.raises(Contested):  # a third does not wait while the second waits
        await Copy("a").connect(world)
    await a.leave()
    await newcomer
    assert world.fleet.attendance.attached("a")


async def test_the_daemon_that_worked_last_takes_the_identity_back(world: World) -> None:
    """A copy that registered during a broken connection is evicted by the working daemon, even with an assignment."""
    a, _ = await devices_that_delivered(world, "a", "b")
    await a.leave()
    copy = Copy("a", works=False)
    await copy.connect(world)
    await world.create(name="second", stop={"rounds": 1})
    await copy.assigned()
    await a.connect(world)
    with pytest.raises(Fenced):
        await copy.stream
    await world.completed("second")


async def test_the_working_daemon_is_known_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that registers first after a restart of the coordinator is evicted."""
    monkeypatch.setattr(module, "HOLD_S", 0.05)
    async with World(tmp_path) as world:
        await devices_that_delivered(world, "a", "b")
    async with World(tmp_path) as world:
        copy = await Copy("a").connect(world)
        await Device("a").connect(world)
        with pytest.raises(Fenced):
            await copy.stream


def test_the_waits_grow_after_a_minute() -> None:
    """Short while a restarted machine's old stream may be undetected; the last four newcomers have their own."""
    contest = Contest(0.0, 0.0)
    copy = Origin("copy")
    assert {contest.wait_s(copy, at) for at in (0.0, 30.0, SHORT_WAITS_S - 1)} == {FIRST_WAIT_S}
    assert [contest.wait_s(copy, SHORT_WAITS_S) for _ in range(3)] == [4.0, 8.0, 16.0]
    assert max(contest.wait_s(copy, SHORT_WAITS_S) for _ in range(100)) == LONGEST_WAIT_S
    assert contest.wait_s(Origin("reset"), SHORT_WAITS_S) == FIRST_WAIT_S
    for number in range(100):
        contest.wait_s(Origin(str(number)), SHORT_WAITS_S)
    assert len(contest.rivals) == 4


async def test_a_lasting_conflict_raises_the_gauge(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From two minutes after its start until a quarter of an hour without a further attempt."""
    now = [1000.0]
    await devices_that_delivered(world, "a", "b")
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(module, "HOLD_S", 0.0)
    for pause, flapping in ((0.0, 0), (FLAPPING_S - 1, 0), (1.0, 1)):
        now[0] += pause
        with pytest.raises(Contested):
            await Copy("a").connect(world)
        assert world.metric("fl_clients_contested") == flapping
    now[0] += QUIET_S
    assert world.metric("fl_clients_contested") == 0
    with pytest.raises(Contested):
        await Copy("a").connect(world)
    contest = world.fleet.contested.contest_of("a")
    assert contest is not None
    assert contest.conflicts == 1


async def test_operators_see_a_contested_identity(world: World) -> None:
    """Both daemons, their addresses, and the number of conflicts."""
    await devices_that_delivered(world, "a", "b")
    token = address.set("192.0.2.7:5000")
    with pytest.raises(Contested):
        await Copy("a").connect(world)
    address.reset(token)
    shown = client_details(
        world.fleet, world.fleet.records.get("a"), world.store.history_between("a", world.store.history_span("a", 9), 9)
    )
    assert (shown.session.instance_id, shown.refused.instance_id) == ("start of a", "copy")
    assert (shown.refused.address, shown.conflicts, shown.contested) == ("192.0.2.7:5000", 1, False)
    assert not shown.HasField("fenced")
    assert shown.client.client_id == "a"


async def test_a_forgotten_client_is_new(world: World) -> None:
    """Neither its work nor its conflicts are remembered."""
    await devices_that_delivered(world, "a", "b")
    with pytest.raises(Contested):
        await Copy("a").connect(world)
    await world.operators.forget("a", "admin")
    await Copy("a").connect(world)
    assert world.fleet.contested.contest_of("a") is None


async def test_many_registrations_are_a_few_rows_of_history(world: World) -> None:
    """The first five of a minute are written; the others are counted in one row at its end."""
    for _ in range(60):
        await world.service.Register(Device("a").registration(), NO_CONTEXT)
    assert history(world) == ["client_registered", *["client_back"] * 5]
    world.fleet.registration._history._limiter._window_s = 0.0
    world.fleet.registration._history._window_ended()
    await until(lambda: len(history(world)) == 7, "the sum is written")
    assert world.store.history("a")[-1].detail.startswith("54 times more within a minute, the last one: start of a")


async def test_a_forgotten_client_stays_banned(world: World) -> None:
    """It is still refused with the reason; after the ban is lifted it is a new client."""
    a = await Device("a").connect(world)
    await world.operators.ban("a", "it lies", "admin")
    assert await world.operators.forget("a", "admin") is True
    for _ in range(2):
        with pytest.raises(Forbidden, match="banned: it lies"):
            await Device("a").connect(world)
    await world.operators.unban("a", "admin")
    await a.connect(world)
    assert world.fleet.records.get("a").tasks
    assert await world.operators.forget("a", "admin") is False


async def test_the_ban_of_a_forgotten_client_survives_a_restart(tmp_path: Path) -> None:
    """The ledger has it, with the reason."""
    async with World(tmp_path) as world:
        await Device("a").connect(world)
        await world.operators.ban("a", "it lies", "admin")
        await world.operators.forget("a", "admin")
    async with World(tmp_path) as world:
        with pytest.raises(Forbidden, match="banned: it lies"):
            await Device("a").connect(world)
        assert world.fleet.attendance.roster.present() == ()
