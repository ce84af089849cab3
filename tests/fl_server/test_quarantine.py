"""Clients whose updates are refused again and again: how long they are left out, and how that begins and ends."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from fl_server import quarantine as module
from fl_server.config import QuarantineConfig
from fl_server.errors import NoSuchClient
from fl_server.quarantine import Quarantine
from fl_server.store.base import UpdateRecord
from fl_server.views import client_status, run_status
from protos.fl.v1.training_pb2 import RefusalReason
from tests.fl_server.devices import Device, stream, upload
from tests.fl_server.harness import World, until

FOREVER = {"after": 1, "first_s": 10_000.0}
"""The first refusal is enough, and nobody waits for the end."""
PAIR = {"round": {"clients_per_round": 2, "quorum": 1}}


@pytest.fixture
def clock(monkeypatch):
    """The clock on the wall, which a test moves."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: clock.now))
    return clock


def refused(reason="REFUSAL_REASON_NORM", admitted=False):
    """An update of client a, as the ledger has it."""
    return UpdateRecord("r", 7, 0, "a", b"", 1, admitted, "" if admitted else reason, "expected less, got more")


def refuse(quarantine, times=1):
    """Refusals in a row; the seconds that the last of them costs."""
    for _ in range(times):
        standing, _ = quarantine.weigh(refused())
        quarantine.keep(standing)
    return quarantine.seconds_left("a")


@pytest.mark.parametrize(
    ("refusals", "seconds"), [(1, 0), (2, 0), (3, 600), (4, 1200), (5, 2400), (10, 76_800), (11, 86_400), (999, 86_400)]
)
def test_each_refusal_costs_twice_the_time(clock, refusals, seconds):
    """10 min for the third, then doubled up to a day: 600 * 2^7 = 76,800 s for the tenth, 2^8 would be over it."""
    assert refuse(Quarantine(QuarantineConfig()), refusals) == seconds


@pytest.mark.parametrize("reason", RefusalReason.keys())
def test_only_a_clients_own_faults_count(reason):
    """What is wrong with an update's header or bytes, and nothing that the round or an operator did."""
    own = {"HEADER", "LAYOUT", "SIZE", "DIGEST", "NOT_FINITE", "NORM"}
    standing, _ = Quarantine(QuarantineConfig()).weigh(refused(reason))
    assert (standing is not None) == (reason.removeprefix("REFUSAL_REASON_") in own)


def test_a_good_update_is_no_refusal():
    """Nothing stands against its client."""
    assert Quarantine(QuarantineConfig(after=1)).weigh(refused(admitted=True)) == (None, None)


def test_zero_switches_it_off(clock):
    """Also what an earlier setting has left in the ledger."""
    before = Quarantine(QuarantineConfig(after=1))
    refuse(before)
    off = Quarantine(QuarantineConfig(after=0))
    off.read_back([before.of("a")])
    assert (off.weigh(refused()), off.of("a"), off.clients()) == ((None, None), None, [])


def test_it_ends_by_the_clock(clock):
    """At its end the client is free, and the next refusal costs twice as long."""
    quarantine = Quarantine(QuarantineConfig())
    refuse(quarantine, 3)
    clock.now += 599.5
    assert (quarantine.clients(), quarantine.seconds_left("a")) == (["a"], 0.5)
    clock.now += 0.5
    assert (quarantine.clients(), quarantine.of("a")) == ([], None)
    assert refuse(quarantine) == 1200


def test_the_history_says_why(clock):
    """How long, until when by everybody's clock, how often and for what."""
    _, why = Quarantine(QuarantineConfig(after=1)).weigh(refused())
    assert (why.time, why.actor, why.event, why.subject) == (1000.0, "coordinator", "client_quarantined", "a")
    assert why.detail == (
        "for 600 s, until 1970-01-01 00:26:40 UTC: an update refused, the last one in run r round 7 (norm): "
        "expected less, got more"
    )


async def bad(world, device, round_=0):
    """The device answers its assignment with a header that no update may have."""
    header, data = await device.update(world, await device.assigned(round_))
    header.num_examples = 0
    parts = upload(header, data, device.session)
    receipt = (await world.service.SubmitUpdate(stream(*parts), None)).receipt
    assert receipt.reason == RefusalReason.REFUSAL_REASON_HEADER


async def good(world, device, round_=0):
    """The device answers its assignment as it should."""
    assert (await device.contribute(world, await device.assigned(round_))).admitted


def shown(world, name="a"):
    """The client as operators see it."""
    return client_status(world.fleet, world.fleet.record(name))


async def test_a_client_that_is_refused_in_a_row_is_not_drawn(tmp_path):
    """After two of two it stays, is told, and is left out of round 2, which goes on with the other."""
    async with World(tmp_path, quarantine={"after": 2}) as world:
        a, b = await Device("a", works=False).come(world), await Device("b").come(world)
        await world.create(round={"sampling": "bernoulli", "rate": 1.0}, stop={"rounds": 3})
        await bad(world, a, 0)
        assert not shown(world).HasField("quarantine")
        await bad(world, a, 1)
        await world.completed()
        assert {assignment.key.round for assignment in a.told("assignment")} == {0, 1}
        assert (world.fleet.state("a"), shown(world).quarantine.refusals) == ("present", 2)
        assert "for 600 s" in a.told("notice")[0].text
        assert (world.metric("fl_quarantines_total"), world.metric("fl_clients_quarantined")) == (1, 1)
        assert b.outcomes["r", 2, 0].counted


async def test_a_run_that_lacks_a_quarantined_client_says_so(tmp_path):
    """Too few are left: it waits, names the client and the way out; released, it is drawn, and all is well."""
    async with World(tmp_path, quarantine=FOREVER) as world:
        a, _ = await Device("a", works=False).come(world), await Device("b").come(world)
        run = await world.create(**PAIR, stop={"rounds": 2})
        await bad(world, a)
        await until(lambda: run.status == "waiting", "it waits")
        reason = run_status(run).reason
        assert reason.startswith("1 of 2 clients are here that could be drawn; 1 in quarantine, first a, for ")
        assert reason.endswith("`fl clients release a` ends it")
        await world.operators.release("a", "admin:eve")
        await good(world, a, 1)
        await world.completed()
        assert (world.store.standings(), world.metric("fl_clients_quarantined")) == ([], 0)
        assert [(line.actor, line.event) for line in world.store.history("a")][-2:] == [
            ("coordinator", "client_quarantined"),
            ("admin:eve", "client_released"),
        ]


async def test_a_quarantine_holds_over_a_restart(tmp_path):
    """Until the same moment, with the same reason; the history has one line."""
    async with World(tmp_path, quarantine=FOREVER) as world:
        a, _ = await Device("a", works=False).come(world), await Device("b").come(world)
        await world.create(**PAIR, stop={"rounds": 1})
        await bad(world, a)
        await world.completed()
        before = shown(world).quarantine
    async with World(tmp_path, quarantine=FOREVER) as world:
        await Device("a").come(world)
        assert (shown(world).quarantine, shown(world).state) == (before, 1)
        assert world.fleet.quarantine.clients() == ["a"]
        assert [line.event for line in world.store.history("a")] == ["client_registered", "client_quarantined"]
        assert before.until.seconds > time.time() + 9000


@pytest.mark.parametrize("restarts", [False, True], ids=["here", "after-a-restart"])
async def test_behind_its_end_a_client_is_drawn_by_itself(tmp_path, restarts):
    """The run that waits for it goes on, without anybody's word."""
    short = {"after": 1, "first_s": 1.0}
    async with World(tmp_path, quarantine=short) as world:
        a, b = await Device("a", works=False).come(world), await Device("b").come(world)
        await world.create(**PAIR, stop={"rounds": 2})
        await bad(world, a)
        await until(lambda: ("r", 0, 0) in b.outcomes, "round 0 is over")
        if not restarts:
            await good(world, a, 1)
            await world.completed()
            return
    async with World(tmp_path, quarantine=short) as world:
        await b.come(world)
        await good(world, await a.come(world), 1)
        await world.completed()


@pytest.mark.parametrize("dies_at", [None, "save", "commit"])
async def test_an_update_that_counts_between_two_refusals(tmp_path, dies_at):
    """Refused, counted, refused: that is one in a row, also for a coordinator that was killed at the commit between."""
    a, b = Device("a", works=False), Device("b", works=False)
    async with World(tmp_path, quarantine={"after": 2}) as world:
        await a.come(world), await b.come(world)
        run = await world.create(**PAIR, stop={"rounds": 3})
        await bad(world, a, 0)
        await good(world, b, 0)
        await b.assigned(1)
        world.journal.dies_at = dies_at
        await good(world, a, 1)
        await good(world, b, 1)
        await until(lambda: world.journal.dead or run.state.round == 2, "it dies or goes on")
        if dies_at is None:
            await end_with_a_refusal(world, a, b)
            return
    async with World(tmp_path, quarantine={"after": 2}) as world:
        await a.come(world), await b.come(world)
        await end_with_a_refusal(world, a, b)


async def end_with_a_refusal(world, a, b):
    """Round 2, the last one, refuses an update of a; nothing from before stands against it."""
    await good(world, b, 2)
    await bad(world, a, 2)
    await world.completed()
    assert [standing.refusals for standing in world.store.standings()] == [1]
    assert not shown(world).HasField("quarantine")


async def test_a_repeat_of_a_refusal_does_not_count(tmp_path):
    """Nor do two that come at once; the client may ask again and again what became of its update."""
    async with World(tmp_path, quarantine={"after": 2}) as world:
        a, _ = await Device("a", works=False).come(world), await Device("b", works=False).come(world)
        await world.create(**PAIR, stop={"rounds": 3})
        await asyncio.gather(bad(world, a), bad(world, a))
        await bad(world, a)
        assert [standing.refusals for standing in world.store.standings()] == [1]
        assert not shown(world).HasField("quarantine")


async def test_what_is_forgotten_is_forgiven(tmp_path):
    """A client that is forgotten and registers anew begins at zero."""
    async with World(tmp_path, quarantine=FOREVER) as world:
        a, _ = await Device("a", works=False).come(world), await Device("b").come(world)
        await world.create(**PAIR, stop={"rounds": 1})
        await bad(world, a)
        await world.completed()
        await world.operators.forget("a", "admin")
        await a.come(world)
        assert not shown(world).HasField("quarantine")


async def test_releasing_needs_a_client_that_is_known(tmp_path):
    """A typing mistake is told; a client that is free already is no error, and leaves no line."""
    async with World(tmp_path) as world:
        await Device("a").come(world)
        await world.operators.release("a", "admin")
        assert [line.event for line in world.store.history("a")] == ["client_registered"]
        with pytest.raises(NoSuchClient, match="no client 'x' has registered"):
            await world.operators.release("x", "admin")
