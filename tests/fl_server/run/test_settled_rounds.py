"""A run with many rounds: what is kept in memory, and the totals that a start reads in place of commits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_server.rounds.metrics import StopPolicy, best_round, stop_reason
from fl_server.run.round_statistics import RoundStatistics
from fl_server.run.rounds import RECENT, RunRounds
from fl_server.store.database.store import Store
from fl_server.store.records import CommitRecord, TotalsRecord
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.criteria import BY_ACCURACY
from tests.fl_server.devices import Device
from tests.fl_server.harness import World
from tests.fl_server.store.records import a_commit

EVALUATIONS = st.lists(st.sampled_from([None, 0.1, 0.4, 0.5, 0.9, math.nan]), max_size=60)


def commits(values: list[float | None]) -> list[CommitRecord]:
    """A commit for each value; None: the round is not evaluated."""
    statistics = RoundStatistics(seconds={"collecting": 0.5}, norms={"update": 1.0})
    statistics.assignments.update(admitted=2)
    return [
        a_commit(
            round_,
            metrics={} if value is None else {"accuracy": value, "loss": 1 - value},
            state_epoch=round_ // 25,
            statistics=statistics.to_text(),
        )
        for round_, value in enumerate(values)
    ]


def shown(rounds: RunRounds) -> Any:
    """Everything that is shown or decided from the rounds of a run."""
    return repr((
        rounds.committed, rounds.bytes.total, rounds.totals(), rounds.latest, rounds.best, rounds.best_commit,
        rounds.best_values(), rounds.newest_metrics(), rounds.newest_round_with("accuracy"),
        [rounds.rounds_of_epoch(epoch) for epoch in range(4)],
    ))  # fmt: skip


@given(EVALUATIONS, st.integers(0, 60))
def test_a_restored_log_is_the_same(values: list[float | None], cut: int) -> None:
    """From totals after any number of rounds and the commits after them."""
    whole, before = RunRounds(BY_ACCURACY), RunRounds(BY_ACCURACY)
    for commit in commits(values):
        whole.add(commit)
    for commit in commits(values)[:cut]:
        before.add(commit)
    restored = RunRounds(BY_ACCURACY)
    if (totals := before.totals_due("r1")) is not None:
        restored.restore(totals)
    for commit in commits(values)[restored.committed :]:
        restored.add(commit)
    assert shown(restored) == shown(whole)
    assert len(restored.recent) <= RECENT


@given(EVALUATIONS, st.integers(0, 60), st.integers(1, 6))
def test_stop_rules_see_all_evaluations(values: list[float | None], extended_at: int, patience: int) -> None:
    """Those that are not in memory any more, too; only those since the last extension."""
    rounds, policy = RunRounds(BY_ACCURACY), StopPolicy(BY_ACCURACY, patience=patience)
    for commit in commits(values):
        rounds.add(commit, extended_at if commit.round >= extended_at else 0)
    every = [(commit.round, commit.metrics) for commit in commits(values) if commit.metrics]
    since = [entry for entry in every if entry[0] >= extended_at]
    assert stop_reason(policy, *rounds.evaluations(extended_at)) == stop_reason(policy, since)
    assert rounds.best == best_round(BY_ACCURACY, every)


@pytest.mark.slow
def test_only_recent_rounds_are_in_memory() -> None:
    """Ten thousand rounds, of which one is still being evaluated."""
    rounds = RunRounds(BY_ACCURACY)
    for commit in commits([0.5] * 10_000):
        if commit.round == 9_900:
            rounds.being_evaluated[commit.round] += 1
        rounds.add(commit)
    assert list(rounds.recent) == list(range(9_900, 10_000))
    late = rounds.add_metrics(a_commit(9_900), {"accuracy": 0.9})
    rounds.being_evaluated[9_900] -= 1
    rounds.add(a_commit(10_000))
    assert (rounds.best_commit, list(rounds.recent)) == (late, list(range(10_001 - RECENT, 10_001)))


def test_metrics_of_a_settled_round_count() -> None:
    """An evaluation that took longer than many rounds."""
    rounds = RunRounds(BY_ACCURACY)
    for commit in commits([0.5] * 40):
        rounds.add(commit)
    record = rounds.add_metrics(a_commit(3), {"accuracy": 0.9})
    assert (rounds.best_commit, record.metrics) == (record, {"accuracy": 0.9})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"metric":"loss"}', "not JSON"])
def test_totals_that_cannot_be_used_are_ignored(content: str) -> None:
    """Of a newer version, of another metric, or damaged: all commits are read then."""
    rounds = RunRounds(BY_ACCURACY)
    rounds.restore(TotalsRecord("r1", 16, content))
    assert rounds.committed == 0


@pytest.mark.slow
async def test_a_start_reads_few_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """of a run of 40 rounds at most 32. What is shown is the same, and it can be extended."""
    async with World(tmp_path) as world:
        await Device("a").connect(world)
        await world.create(round={"clients_per_round": 1}, stop={"rounds": 40})
        digests = await world.completed()
        before = await shown_run(world)
    read: list[int] = []
    original = Store.commits
    monkeypatch.setattr(Store, "commits", lambda *args: counted(original(*args), read))
    async with World(tmp_path) as world:
        assert sum(read) <= 2 * RECENT
        run = world.coordinator.run("r")
        assert (run.rounds.committed, len(run.rounds.recent)) == (40, RECENT)
        assert await shown_run(world) == before
        await Device("a").connect(world)
        await world.coordinator.actions.extend(run, 2, 0.0, "admin")
        assert (await world.completed())[:40] == digests


def counted(commits: list[CommitRecord], read: list[int]) -> list[CommitRecord]:
    """The commits; their number is added to `read`."""
    read.append(len(commits))
    return commits


async def shown_run(world: World) -> Any:
    """`fl run show --json`."""
    async with admin_channel(world) as channel:
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        status = await stub.GetRun(pb.GetRunRequest(run_id="r", with_rounds=True))
        status.run.account.ClearField("seconds")
        return status


@pytest.mark.slow
async def test_a_ledger_without_totals_gets_them_at_the_first_start(tmp_path: Path) -> None:
    """Late metrics of a settled round remove them until the next start."""
    async with World(tmp_path) as world:
        await Device("a").connect(world)
        await world.create(round={"clients_per_round": 1}, stop={"rounds": 40})
        await world.completed()
        first = world.store.totals("r")
        assert first is not None
        assert first.rounds in range(40 - 2 * RECENT, 40 - RECENT + 1)
        world.store.set_metrics("r", 0, {"loss": 0.5})
        assert world.store.totals("r") is None
    async with World(tmp_path) as world:
        totals = world.store.totals("r")
        assert totals is not None
        assert totals.rounds == 40 - RECENT
        best = world.coordinator.run("r").rounds.best_commit
        assert best is not None
        assert replace(best, metrics={}) == replace(world.store.commits("r")[0], metrics={})
