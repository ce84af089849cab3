"""Counted updates by client beside what the client is due: the arithmetic, the warning, and a restart."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from pathlib import Path

import pytest

from fl_server.rpc.views import client_status, run_status
from fl_server.run.rounds import RECENT, RunRounds
from fl_server.run.totals import ClientShares, Draw, Share
from fl_web.facts.run import attention
from fl_web.facts.words import fact
from tests.fl_server.criteria import BY_ACCURACY
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until
from tests.fl_server.store.records import a_commit

CLIENTS = [f"c{number:02}" for number in range(100)]
SLOW = frozenset(CLIENTS[:30])


def closed(chance: random.Random, factor: float, slow: frozenset[str]) -> Draw:
    """A round of 10 updates: factor times as many clients are drawn, and slow ones come last."""
    drawn = chance.sample(CLIENTS, round(10 * factor))
    counted = sorted(drawn, key=lambda client: (client in slow, chance.random()))[:10]
    return Draw(frozenset(drawn), frozenset(counted))


def shares_after(rounds: int, factor: float, slow: frozenset[str] = SLOW) -> ClientShares:
    """The shares after so many such rounds."""
    shares, chance = ClientShares(), random.Random(7)
    for _ in range(rounds):
        shares.add(closed(chance, factor, slow))
    shares.look()
    return shares


def test_a_client_is_due_its_part_of_the_rounds_that_drew_it() -> None:
    """Two of three, then one of two: 2/3 + 1/2, variance 2/9 + 1/4. A client that was not drawn is due nothing."""
    shares = ClientShares()
    shares.add(Draw(frozenset("abc"), frozenset("ab")))
    shares.add(Draw(frozenset("ad"), frozenset("a")))
    assert shares.by_client["a"] == pytest.approx(Share(2, 2 / 3 + 1 / 2, 2 / 9 + 1 / 4))
    assert (shares.by_client["c"].counted, shares.by_client["d"].due) == (0, 0.5)
    assert sum(share.due for share in shares.by_client.values()) == pytest.approx(3)


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.3, 2.0])
def test_a_fair_close_warns_of_nobody(factor: float) -> None:
    """However many are drawn, if nobody is always slow: chance alone puts no client below half of its due."""
    for rounds in (50, 150, 500):
        assert not shares_after(rounds, factor, frozenset()).too_low


def test_a_close_that_prefers_fast_clients_warns_of_the_slow_ones_alone() -> None:
    """With a factor of 1.3 the slowest 30 % have 11 % of the counted updates, as the page of clients says."""
    shares = shares_after(500, 1.3)
    assert shares.too_low.keys() <= SLOW
    assert len(shares.too_low) > 27
    counted = sum(share.counted for client, share in shares.by_client.items() if client in SLOW)
    assert counted / 5000 == pytest.approx(0.114, abs=0.01)
    assert shares.spread["lowest"] < 0.5 < shares.spread["median"] < shares.spread["highest"]
    assert not shares_after(500, 1.1).too_low.keys() - SLOW


def test_few_rounds_say_nothing() -> None:
    """A client that is due fewer than five updates has no share, and one that missed by chance is not named."""
    shares = shares_after(20, 1.3)
    assert (shares.too_low, shares.spread) == ({}, {})


@pytest.mark.parametrize("rounds", [RECENT - 1, RECENT, 3 * RECENT + 5])
def test_a_restored_log_has_the_same_shares(rounds: int) -> None:
    """From the totals in the ledger, and the draws of the commits after them."""
    chance = random.Random(7)
    draws = [closed(chance, 1.3, SLOW) for _ in range(rounds)]
    whole, restored = RunRounds(BY_ACCURACY), RunRounds(BY_ACCURACY)
    for number, draw in enumerate(draws):
        whole.add(a_commit(number), 0, draw)
        if (totals := whole.totals_due("r1")) is not None:
            restored = RunRounds(BY_ACCURACY)
            restored.restore(totals)
    for number in range(restored.committed, rounds):
        restored.add(a_commit(number), 0, draws[number])
    assert restored.shares.by_client.keys() == whole.shares.by_client.keys()
    for client, share in whole.shares.by_client.items():
        assert restored.shares.by_client[client] == pytest.approx(share, abs=1e-3)


async def test_operators_are_told_once_of_a_slow_client_and_a_restart_keeps_it(tmp_path: Path) -> None:
    """Three are drawn for two, and c never comes first: history, note, metrics and `fl run show`, also afterwards."""
    over = {"clients_per_round": 2, "close": "goal", "over_selection": 1.5, "min_clients": 3}
    async with World(tmp_path) as world:
        devices = [Device(name, works=name != "c") for name in "abc"]
        await asyncio.gather(*(device.connect(world) for device in devices))
        run = await world.create(round=over, stop={"rounds": 20})
        await world.completed()
        assert world.metric("fl_clients_below_due", run="r") == 1
        assert world.metric("fl_client_share_of_due", run="r", statistic="lowest") == 0
        assert world.metric("fl_client_share_of_due", run="r", statistic="highest") == pytest.approx(1.5)
        shown = run_status(run)
        due = fact("below their due", "c (0 counted, 13.3 due); the model learns little of their data")
        assert due in attention(shown)
        note = client_status(world.fleet, world.fleet.records.get("c")).note
        assert note.startswith(
            "c has 0 counted updates in run r and is due 6.0, so the model learns little of its data"
        )
        await until(lambda: lines(world), "the history has it")
    async with World(tmp_path) as world:
        again = run_status(world.coordinator.run("r"))
        assert (again.below_due, list(again.first_below_due)) == (1, list(shown.first_below_due))
        assert world.coordinator.run("r").rounds.shares.told == {"c"}
        assert lines(world) == [note]
        assert world.metric("fl_client_share_of_due", run="r", statistic="highest") == pytest.approx(1.5)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:  # as a kill before the line leaves it
        assert ledger.execute("DELETE FROM history WHERE event = 'client_below_due'").rowcount == 1
    ledger.close()
    async with World(tmp_path) as world:
        await until(lambda: lines(world), "the restart makes up the line")
        assert lines(world)[0].startswith("c has 0 counted updates in run r and is due 13.3")


def lines(world: World) -> list[str]:
    """The lines of the run's history about clients below their due."""
    return [entry.detail for entry in world.store.history("r") if entry.event == "client_below_due"]
