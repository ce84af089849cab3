"""Clients with repeated refusals: the start, the length and the end of their quarantine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_server.clients import quarantine as module
from fl_server.clients.quarantine import Quarantine
from fl_server.errors import NoSuchClient
from fl_server.rpc.views import client_status, run_status
from fl_server.run.run import Run
from fl_server.settings.config import QuarantineConfig
from fl_server.store.records import UpdateRecord
from protos.fl.v1 import admin_pb2
from protos.fl.v1.training_pb2 import RefusalReason
from tests.fl_server.devices import NO_CONTEXT, Device, stream, upload
from tests.fl_server.harness import World, until
from tests.marks import slow_except

FOREVER = {"after": 1, "first_s": 10_000.0}
"""The first refusal is enough, and the quarantine outlasts the test."""
PAIR = {"round": {"clients_per_round": 2, "quorum": 1}}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A wall clock that a test moves."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: clock.now))
    return clock


WHERE = "run r round 7"


def refused(reason: str = "REFUSAL_REASON_NORM", admitted: bool = False) -> UpdateRecord:
    """The ledger's row of an update of client a."""
    return UpdateRecord("r", 7, 0, "a", b"", 1, admitted, "" if admitted else reason, "expected less, got more")


def count_refusals(quarantine: Quarantine, times: int = 1) -> float:
    """Count refusals in a row; returns the seconds of the quarantine after the last."""
    for _ in range(times):
        record, _ = quarantine.count_refusal(refused(), WHERE)
        assert record is not None
        quarantine.keep(record)
    return quarantine.seconds_left("a")


@pytest.mark.parametrize(
    ("refusals", "seconds"), [(1, 0), (2, 0), (3, 600), (4, 1200), (5, 2400), (10, 76_800), (11, 86_400), (999, 86_400)]
)
def test_each_refusal_costs_twice_the_time(clock: SimpleNamespace, refusals: int, seconds: float) -> None:
    """10 min for the third, then doubled up to a day: 600 * 2^7 = 76,800 s for the tenth; 2^8 would exceed a day."""
    assert count_refusals(Quarantine(QuarantineConfig()), refusals) == seconds


@pytest.mark.parametrize("reason", RefusalReason.keys())
def test_only_a_clients_own_faults_count(reason: str) -> None:
    """Faults of an update's header or bytes count; reasons of the round or of an operator do not."""
    own = {"HEADER", "LAYOUT", "SIZE", "DIGEST", "NOT_FINITE", "NORM"}
    record, _ = Quarantine(QuarantineConfig()).count_refusal(refused(reason), WHERE)
    assert (record is not None) == (reason.removeprefix("REFUSAL_REASON_") in own)


def test_a_good_update_is_no_refusal() -> None:
    """Its client has no refusals."""
    assert Quarantine(QuarantineConfig(after=1)).count_refusal(refused(admitted=True), WHERE) == (None, None)


def test_zero_disables_quarantine(clock: SimpleNamespace) -> None:
    """Also a quarantine that an earlier setting left in the ledger."""
    before = Quarantine(QuarantineConfig(after=1))
    count_refusals(before)
    off = Quarantine(QuarantineConfig(after=0))
    quarantined = before.of("a")
    assert quarantined is not None
    off.restore([quarantined])
    assert (off.count_refusal(refused(), WHERE), off.of("a"), off.clients()) == ((None, None), None, [])


def test_a_quarantine_ends_by_the_clock(clock: SimpleNamespace) -> None:
    """At its end the client is free, and the next refusal doubles the time."""
    quarantine = Quarantine(QuarantineConfig())
    count_refusals(quarantine, 3)
    clock.now += 599.5
    assert (quarantine.clients(), quarantine.seconds_left("a")) == (["a"], 0.5)
    clock.now += 0.5
    assert (quarantine.clients(), quarantine.of("a")) == ([], None)
    assert count_refusals(quarantine) == 1200


def test_the_history_has_the_reason(clock: SimpleNamespace) -> None:
    """The length, the end in UTC, the number of refusals and the reason."""
    _, why = Quarantine(QuarantineConfig(after=1)).count_refusal(refused(), WHERE)
    assert why is not None
    assert (why.time, why.actor, why.event, why.subject) == (1000.0, "coordinator", "client_quarantined", "a")
    assert why.detail == (
        "for 10 min 00 s, until 1970-01-01 00:26:40 UTC: an update refused, the last one in run r round 7 (norm): "
        "expected less, got more"
    )


async def deliver_invalid(world: World, device: Device, round_: int = 0) -> None:
    """The device delivers an update with an invalid header."""
    header, data = await device.update(world, await device.assigned(round_))
    header.num_examples = 0
    parts = upload(header, data, device.session)
    receipt = (await world.service.SubmitUpdate(stream(*parts), NO_CONTEXT)).receipt
    assert receipt.reason == RefusalReason.REFUSAL_REASON_HEADER


async def deliver_valid(world: World, device: Device, round_: int = 0) -> None:
    """The device delivers a valid update."""
    receipt = await device.contribute(world, await device.assigned(round_))
    assert receipt is not None
    assert receipt.admitted


def status_of(world: World, name: str = "a") -> admin_pb2.ClientStatus:
    """The client as operators see it."""
    return client_status(world.fleet, world.fleet.records.get(name))


async def test_a_client_that_is_refused_in_a_row_is_not_drawn(tmp_path: Path) -> None:
    """After two of two it stays connected, gets a notice, and is left out of round 2, which the other completes."""
    async with World(tmp_path, quarantine={"after": 2}) as world:
        a, b = await Device("a", works=False).connect(world), await Device("b").connect(world)
        await world.create(round={"sampling": "bernoulli", "rate": 1.0}, stop={"rounds": 3})
        await deliver_invalid(world, a, 0)
        assert not status_of(world).HasField("quarantine")
        await deliver_invalid(world, a, 1)
        await world.completed()
        assert {assignment.key.round for assignment in a.pushed("assignment")} == {0, 1}
        assert (world.fleet.attendance.state("a"), status_of(world).quarantine.refusals) == ("present", 2)
        assert "for 10 min 00 s" in a.pushed("notice")[0].text
        assert (world.metric("fl_quarantines_total"), world.metric("fl_clients_quarantined")) == (1, 1)
        assert b.outcomes["r", 2, 0].counted


async def run_with_too_few_clients(world: World) -> tuple[Device, Device, Run]:
    """Two of three are a quorum, and only one is left after round 0: "a" is in quarantine, and "c" is drained."""
    a, c = [await Device(name, works=False).connect(world) for name in "ac"]
    b = await Device("b").connect(world)
    run = await world.create(round={"clients_per_round": 3, "quorum": 2}, stop={"rounds": 2})
    await deliver_invalid(world, a)
    await world.operators.drain("c", "it moves", undo=False, actor="admin")
    await deliver_valid(world, c)
    await until(lambda: ("r", 0, 0) in b.outcomes, "round 0 is over")
    return a, b, run


async def test_a_run_that_waits_for_a_quarantined_client_shows_it(tmp_path: Path) -> None:
    """Too few clients are left: the run waits and names the client and the remedy; after a release it continues."""
    async with World(tmp_path, quarantine=FOREVER) as world:
        a, _, run = await run_with_too_few_clients(world)
        await until(lambda: run.status == "waiting", "it waits")
        reason = run_status(run).reason
        assert reason.startswith("clients that could be drawn: 1 of 3 here; 1 in quarantine, first a: for ")
        assert reason.endswith("`fl clients release a` ends it")
        await world.operators.release("a", "admin:eve")
        await deliver_valid(world, a, 1)
        await world.completed()
        assert (world.store.quarantine_records(), world.metric("fl_clients_quarantined")) == ([], 0)
        assert [(line.actor, line.event) for line in world.store.history("a")][-2:] == [
            ("coordinator", "client_quarantined"),
            ("admin:eve", "client_released"),
        ]


async def test_a_quarantine_holds_over_a_restart(tmp_path: Path) -> None:
    """The end and the reason stay; the history has one row."""
    async with World(tmp_path, quarantine=FOREVER) as world:
        a, _ = await Device("a", works=False).connect(world), await Device("b").connect(world)
        await world.create(**PAIR, stop={"rounds": 1})
        await deliver_invalid(world, a)
        await world.completed()
        before = status_of(world).quarantine
    async with World(tmp_path, quarantine=FOREVER) as world:
        await Device("a").connect(world)
        assert (status_of(world).quarantine, status_of(world).state) == (before, 1)
        assert world.fleet.quarantine.clients() == ["a"]
        assert [line.event for line in world.store.history("a")] == ["client_registered", "client_quarantined"]
        assert before.until.seconds > time.time() + 9000


@pytest.mark.parametrize("restarts", [False, True], ids=["here", "after-a-restart"])
async def test_after_its_end_a_client_is_drawn_without_an_action(tmp_path: Path, restarts: bool) -> None:
    """The run that waits for it continues without an operator."""
    short = {"after": 1, "first_s": 1.0}
    async with World(tmp_path, quarantine=short) as world:
        a, b, _ = await run_with_too_few_clients(world)
        if not restarts:
            await deliver_valid(world, a, 1)
            await world.completed()
            return
    async with World(tmp_path, quarantine=short, reattach_grace_s=0.5) as world:
        await b.connect(world)
        await deliver_valid(world, await a.connect(world), 1)
        await world.completed()


@pytest.mark.parametrize("dies_at", slow_except([None, "save", "commit"], "commit"))
async def test_a_counted_update_between_two_refusals_resets_the_count(tmp_path: Path, dies_at: str | None) -> None:
    """Refused, counted, refused: one refusal in a row, also if the coordinator was killed at the commit between."""
    a, b = Device("a", works=False), Device("b", works=False)
    async with World(tmp_path, quarantine={"after": 2}) as world:
        await a.connect(world), await b.connect(world)
        run = await world.create(**PAIR, stop={"rounds": 3})
        await deliver_invalid(world, a, 0)
        await deliver_valid(world, b, 0)
        await b.assigned(1)
        world.journal.dies_at = dies_at
        await deliver_valid(world, a, 1)
        await deliver_valid(world, b, 1)
        await until(lambda: world.journal.dead or run.state.round == 2, "the coordinator is killed or round 2 opens")
        if dies_at is None:
            await end_with_a_refusal(world, a, b)
            return
    async with World(tmp_path, quarantine={"after": 2}) as world:
        await a.connect(world), await b.connect(world)
        await end_with_a_refusal(world, a, b)


async def end_with_a_refusal(world: World, a: Device, b: Device) -> None:
    """Refuse an update of a in round 2, the last one; earlier refusals do not count."""
    await deliver_valid(world, b, 2)
    await deliver_invalid(world, a, 2)
    await world.completed()
    assert [record.refusals for record in world.store.quarantine_records()] == [1]
    assert not status_of(world).HasField("quarantine")


async def test_a_repeat_of_a_refusal_does_not_count(tmp_path: Path) -> None:
    """Nor do two at the same time; a client may repeat an upload to learn its outcome."""
    async with World(tmp_path, quarantine={"after": 2}) as world:
        a, _ = await Device("a", works=False).connect(world), await Device("b", works=False).connect(world)
        await world.create(**PAIR, stop={"rounds": 3})
        await asyncio.gather(deliver_invalid(world, a), deliver_invalid(world, a))
        await deliver_invalid(world, a)
        assert [record.refusals for record in world.store.quarantine_records()] == [1]
        assert not status_of(world).HasField("quarantine")


async def test_forgetting_a_client_resets_its_refusals(tmp_path: Path) -> None:
    """A forgotten client that registers again starts at zero."""
    async with World(tmp_path, quarantine=FOREVER) as world:
        a, _ = await Device("a", works=False).connect(world), await Device("b").connect(world)
        await world.create(**PAIR, stop={"rounds": 1})
        await deliver_invalid(world, a)
        await world.completed()
        await world.operators.forget("a", "admin")
        await a.connect(world)
        assert not status_of(world).HasField("quarantine")


async def test_a_release_needs_a_known_client(tmp_path: Path) -> None:
    """A mistyped id is an error; a client without quarantine is no error, and no row is written."""
    async with World(tmp_path) as world:
        await Device("a").connect(world)
        await world.operators.release("a", "admin")
        assert [line.event for line in world.store.history("a")] == ["client_registered"]
        with pytest.raises(NoSuchClient, match="no client 'x' has registered"):
            await world.operators.release("x", "admin")
