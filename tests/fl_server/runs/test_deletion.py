"""Deletion of runs: what is removed, what stays, and crashes in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from fl_server.errors import NoSuchRun, RunExists, WrongState
from fl_server.runs.table import DAY_S, Retention, runs_to_delete
from fl_server.settings.config import RetentionConfig
from fl_server.store.database import ledger_runs, schema
from fl_server.store.database.transactions import rows_where
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server import harness
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until
from tests.marks import slow_except

REMOVALS = {"remove_run", "remove_rounds", "remove_run_history"}
"""Writes of a deletion, apart from `update_run`, which marks the run."""
TABLES = ("attempts", "updates", "accepted", "commits", "run_totals", "client_evaluations", "client_states")


async def complete_runs(folder: Path, *names: str) -> None:
    """Completed runs in a state directory."""
    async with World(folder) as world:
        for client in "ab":
            await Device(client).connect(world)
        for name in names:
            await world.create(name=name)
            await world.completed(name)


def traces(world: World, folder: Path, run_id: str) -> list[str]:
    """Where something of a run is left: tables, and paths under the state directory."""
    with world.store._transaction("count") as db:
        found = [name for name in TABLES if db.execute(rows_where(schema.metadata.tables[name], run_id=run_id)).first()]
    return found + [str(path.relative_to(folder)) for path in folder.rglob(f"*{run_id}*")]


def history(world: World, run_id: str) -> list[tuple[str, str]]:
    """(actor, event) of a run's history."""
    return [(line.actor, line.event) for line in world.store.history(run_id)]


async def deleted(world: World, run_id: str) -> None:
    """Wait until nothing removes the run any more."""
    await until(lambda: ("coordinator", "run_removed") in history(world, run_id), "the run is removed")


async def test_a_deleted_run_leaves_a_line_of_history_and_its_id(tmp_path: Path) -> None:
    """Rows, models and metrics are gone, the other run stays whole, and no run gets the id again."""
    await complete_runs(tmp_path, "gone", "kept")
    async with World(tmp_path) as world:
        assert traces(world, tmp_path, "gone")
        assert "gone" in str(list(world.services.metrics.registry.collect()))
        assert await world.coordinator.deletions.delete("gone", "no longer needed", "admin:eve")
        assert traces(world, tmp_path, "gone") == []
        assert history(world, "gone") == [
            ("admin", "run_created"), ("admin:eve", "run_deleted"), ("coordinator", "run_removed")
        ]  # fmt: skip
        assert world.store.history("gone")[1].detail == "no longer needed"
        assert "gone" not in str(list(world.services.metrics.registry.collect()))
        assert [run.id for run in world.coordinator.runs()] == ["kept"]
        assert len(world.store.commits("kept")) == 2
        with pytest.raises(NoSuchRun):
            world.coordinator.run("gone")
        assert world.coordinator.table.is_over("gone")
    async with World(tmp_path) as world:
        with pytest.raises(RunExists, match="'gone' was deleted, and ids are not used again; choose another name"):
            await world.create(name="gone")
        assert [run.id for run in world.coordinator.runs()] == ["kept"]


@pytest.mark.parametrize("dies_at", slow_except(range(1, 7), 1, 4))
async def test_a_start_completes_a_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
    """SIGKILL after each write: after the first the run is never shown again, and its data is removed."""
    monkeypatch.setattr(harness, "WRITES", harness.WRITES | REMOVALS)
    await complete_runs(tmp_path, "gone", "kept")
    async with World(tmp_path) as world:
        journal = world.journal
        before = len(journal.writes)
        journal.dies_at = before + dies_at
        world.spawn(world.coordinator.deletions.delete("gone", "", "admin:eve"))
        await until(lambda: journal.dead, "the coordinator is killed")
        assert journal.writes[before:][0] == "update_run"
    async with World(tmp_path) as world:
        assert [run.id for run in world.coordinator.runs()] == ["kept"]
        await deleted(world, "gone")
        assert traces(world, tmp_path, "gone") == []
        assert len(world.store.commits("kept")) == 2


async def test_only_a_run_that_has_ended_is_deleted(tmp_path: Path) -> None:
    """A waiting run is refused with what to do, and a run that cannot be loaded can be deleted."""
    async with World(tmp_path) as world:
        await world.create(name="open", round={"clients_per_round": 2})
        with pytest.raises(WrongState, match="deleting needs it to be completed or stopped or failed"):
            await world.coordinator.deletions.delete("open", "", "admin:eve")
        with pytest.raises(NoSuchRun):
            await world.coordinator.deletions.delete("unknown", "", "admin:eve")
    async with World(tmp_path, tasks=()) as world:
        async with admin_channel(world) as channel:
            stub: Any = admin_pb2_grpc.AdminStub(channel)
            assert (await stub.DeleteRun(pb.DeleteRunRequest(run_id="open"))).finished
            with pytest.raises(grpc.RpcError) as refused:
                await stub.GetRun(pb.GetRunRequest(run_id="open"))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert traces(world, tmp_path, "open") == []


async def test_a_deletion_takes_many_short_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rounds and a thousand lines at a time, here one of each; the result is the same."""
    monkeypatch.setattr(ledger_runs, "ROUNDS_AT_ONCE", 1)
    monkeypatch.setattr(ledger_runs, "LINES_AT_ONCE", 1)
    await complete_runs(tmp_path, "gone")
    async with World(tmp_path) as world:
        assert await world.coordinator.deletions.delete("gone", "", "admin:eve")
        assert traces(world, tmp_path, "gone") == []


async def test_ended_runs_over_a_limit_are_deleted(tmp_path: Path) -> None:
    """The latest ones are kept, with the reason in the history; a run that has not ended stays, whatever its age."""
    await complete_runs(tmp_path, "first", "second", "third")
    async with World(tmp_path) as world:
        await world.create(name="open", round={"clients_per_round": 5, "min_clients": 5})
        runs = world.coordinator.runs()
        ended = {run.id: run.record.ended_at for run in runs}
        late = float(ended["first"] or 0) + 2 * DAY_S + 1e-3
        by_age = dict(runs_to_delete(RetentionConfig(keep_days=2.0), runs, late))
        assert by_age == {"first": "retention.keep_days = 2"}
        assert dict(runs_to_delete(RetentionConfig(), runs, late)) == {}
        rules = RetentionConfig(keep_runs=2)
        await Retention(rules, world.services.ledger, world.coordinator.table, world.coordinator.deletions).apply()
        assert [run.id for run in world.coordinator.runs()] == ["second", "third", "open"]
        assert [line.detail for line in world.store.history("first") if line.event == "run_deleted"] == [
            "retention.keep_runs = 2"
        ]


@pytest.mark.slow
async def test_details_of_old_rounds_are_removed(tmp_path: Path) -> None:
    """Summaries of all rounds stay; a restart and further rounds need no removed detail."""
    async with World(tmp_path) as world:
        await Device("a").connect(world)
        run = await world.create(round={"clients_per_round": 1}, stop={"rounds": 30})
        digests = await world.completed()
        rules = RetentionConfig(keep_rounds=20)
        await Retention(rules, world.services.ledger, world.coordinator.table, world.coordinator.deletions).apply()
        assert [world.store.attempts("r", round_) == [] for round_ in range(30)] == [True] * 10 + [False] * 20
        assert [world.store.accepted("r", round_, 0) is None for round_ in range(30)] == [True] * 10 + [False] * 20
        assert run.rounds.committed == 30
    async with World(tmp_path) as world:
        await Device("a").connect(world)
        await world.coordinator.actions.extend(world.coordinator.run("r"), 2, 0.0, "admin")
        assert (await world.completed())[:30] == digests
        assert len(world.store.commits("r")) == 32


def test_too_few_rounds_are_refused() -> None:
    """Norm limits need the latest ten."""
    with pytest.raises(ValueError, match="keep_rounds: expected 0, which keeps all, or at least 20, got 5"):
        RetentionConfig(keep_rounds=5)
