"""Runs in the ledger that this coordinator cannot load, and limits that prevent such runs."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from fl_server.errors import InvalidInput, NoSuchRun, RunExists, one_line
from fl_server.run.models import ModelStore
from fl_server.run_settings.sections import MAX_COUNT, MAX_SECONDS
from fl_server.runs.table import MAX_KEYS, REFUSALS_AT_ONCE, HistoryRate
from fl_server.store.errors import StoreFull
from fl_tasks import TaskError
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import admin_pb2_grpc
from tests.fl_server.admin_stack import admin_channel
from tests.fl_server.harness import TASK, World

NO_ROUND = {"round": {"clients_per_round": 2}}


async def listed_runs(world: World) -> dict[str, Any]:
    """`fl run list`: state and reason by run."""
    async with admin_channel(world) as channel:
        answer = await admin_pb2_grpc.AdminStub(channel).ListRuns(pb.ListRunsRequest())
    return {run.run_id: (run.state, run.reason) for run in answer.runs}


def change_spec(folder: Path, run_id: str, change: Callable[[str], str]) -> None:
    """Change a run's spec in the ledger, as a bug or a manual edit would."""
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        (text,) = db.execute("SELECT spec FROM runs WHERE run_id = ?", [run_id]).fetchone()
        db.execute("UPDATE runs SET spec = ? WHERE run_id = ?", [change(text), run_id])


def with_rounds(rounds: object) -> Callable[[str], str]:
    """A function that sets the number of rounds in a spec's text."""

    def change(text: str) -> str:
        spec = json.loads(text)
        spec["stop"]["rounds"] = rounds
        return json.dumps(spec)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(with_rounds(2**32 + 3), "stop.rounds: expected less than or equal to 4294967295", id="rounds"),
        pytest.param(with_rounds("many"), "stop.rounds: expected a whole number", id="text"),
        pytest.param(lambda text: text[:-9], "spec: expected a JSON object in the run's row", id="torn"),
        pytest.param(lambda text: "[]", "spec: expected a JSON object in the run's row", id="list"),
        pytest.param(
            lambda text: text.replace("tiny_task:Tiny", "other_task:Other"),
            "task.name: expected a task that this coordinator may load: built in (digits,",
            id="task",
        ),
    ],
)  # fmt: skip
async def test_a_bad_row_is_listed_with_its_problem(tmp_path: Path, change: Callable[[str], str], why: str) -> None:
    """The coordinator starts, the other run works, the id stays in use, and each response on the run has the reason."""
    async with World(tmp_path) as world:
        for name in ("bad", "good"):
            await world.create(name=name, **NO_ROUND)
    change_spec(tmp_path, "bad", change)
    async with World(tmp_path) as world:
        found = await listed_runs(world)
        assert list(found) == ["bad", "good"]
        assert found["good"][0] == pb.RUN_STATE_WAITING
        state, reason = found["bad"]
        assert state == pb.RUN_STATE_UNSPECIFIED
        assert reason.startswith(f"not loaded: {why}")
        with pytest.raises(NoSuchRun, match="run 'bad' is in the ledger and not loaded: "):
            world.coordinator.run("bad")
        with pytest.raises(RunExists):
            await world.create(name="bad", **NO_ROUND)
        async with admin_channel(world) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            assert (await stub.GetRun(pb.GetRunRequest(run_id="bad", with_rounds=True))).run.reason == reason
            with pytest.raises(grpc.RpcError, match="not loaded") as refused:
                await stub.ResumeRun(pb.ResumeRunRequest(run_id="bad"))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_run_is_loaded_again_once_its_task_is_listed(tmp_path: Path) -> None:
    """A coordinator without the task starts and shows the run; the next one, which lists the task, continues it."""
    async with World(tmp_path) as world:
        await world.create(name="mine", **NO_ROUND)
    async with World(tmp_path, tasks=()) as world:
        _, reason = (await listed_runs(world))["mine"]
        assert "or listed under `tasks` in its server.toml (none is)" in reason
        assert not world.coordinator.table.is_over("mine")
    async with World(tmp_path, tasks=[TASK]) as world:
        assert (await listed_runs(world))["mine"][0] == pb.RUN_STATE_WAITING


async def test_one_run_that_cannot_be_shown_hides_no_other(tmp_path: Path) -> None:
    """A run with any damage in memory is listed with the error."""
    async with World(tmp_path) as world:
        for name in ("bad", "good"):
            run = await world.create(name=name, **NO_ROUND)
        bad = world.coordinator.run("bad")
        stop = bad.config.stop.model_copy(update={"rounds": 2**40})
        bad.config = bad.config.model_copy(update={"stop": stop})
        found = await listed_runs(world)
        assert found["bad"][1].startswith("it cannot be shown: ")
        assert found["good"] == (
            pb.RUN_STATE_WAITING,
            f"{run.run_status.waiting_reason}; it lacks clients: none is here",
        )


async def test_an_extension_is_checked_before_it_is_written(tmp_path: Path) -> None:
    """More rounds than the field holds, and invalid times, are refused; a valid extension is kept over a restart."""
    async with World(tmp_path) as world:
        run = await world.create(stop={"rounds": 2, "wall_time_s": 60.0}, **NO_ROUND)
        for rounds, seconds in (
            (MAX_COUNT, 0.0), (MAX_COUNT - 1, 0.0), (1, -1.0), (1, float("nan")), (1, float("inf")), (0, MAX_SECONDS),
        ):  # fmt: skip
            with pytest.raises(InvalidInput, match="rounds: expected at most|wall_time_s: expected 0 to"):
                await world.coordinator.actions.extend(run, rounds, seconds, "admin")
        await world.coordinator.actions.extend(run, MAX_COUNT - 2, MAX_SECONDS - 60.0, "admin")
        assert (run.config.stop.rounds, run.config.stop.wall_time_s) == (MAX_COUNT, MAX_SECONDS)
    async with World(tmp_path) as world:
        assert (await listed_runs(world))["r"][0] == pb.RUN_STATE_WAITING
        assert [row.event for row in world.store.history("r")].count("run_extended") == 1


async def test_a_refused_task_is_in_the_history_and_was_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row has operator, task and reason, and the module was not run."""
    (tmp_path / "evil_task.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'marker')!r}).touch()")
    monkeypatch.syspath_prepend(tmp_path)
    async with World(tmp_path / "state") as world:
        with pytest.raises(InvalidInput, match=r"task.name: .* listed under `tasks` in its server.toml"):
            await world.create(name="evil", task={"name": "evil_task:Wine"})
        with pytest.raises(InvalidInput, match="does not take the options size"):
            await world.create(name="wrong", task={"name": TASK, "options": {"size": 3}})
        rows = [(row.actor, row.event, row.subject) for row in world.store.history()]
        assert rows == [("admin", "run_refused", "evil"), ("admin", "run_refused", "wrong")]
        assert world.store.history("evil")[0].detail.startswith("task evil_task:Wine: task.name: expected a task that")
        assert world.coordinator.runs() == []
    assert not (tmp_path / "marker").exists()
    assert "evil_task" not in sys.modules


async def test_refusals_do_not_fill_the_history(tmp_path: Path) -> None:
    """The first refusals of one operator have a row each; the rest are counted."""
    async with World(tmp_path) as world:
        for index in range(REFUSALS_AT_ONCE + 30):
            with pytest.raises(InvalidInput):
                await world.create(name=f"evil-{index}", task={"name": f"evil_{index}:Wine"})
        assert len(world.store.history()) == REFUSALS_AT_ONCE


async def test_an_export_is_in_the_history_once_an_hour(tmp_path: Path) -> None:
    """Operator, round, digest and size; the same model again writes no second row, another run's does."""
    async with World(tmp_path) as world, admin_channel(world) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        for name in ("r", "s"):
            await world.create(name=name, **NO_ROUND)
        for name in ("r", "r", "r", "s"):
            answer = [part async for part in stub.ExportModel(pb.ExportModelRequest(run_id=name))]
        rows = [row for row in world.store.history() if row.event == "model_exported"]
        assert [(row.actor, row.subject) for row in rows] == [("admin", "r"), ("admin", "s")]
        header = answer[0].header
        assert rows[1].detail == (
            f"the first model, blake3:{header.digest.value.hex()}, {header.size_bytes} bytes"
        )  # fmt: skip


async def test_a_full_ledger_delays_no_refusal_and_no_export(tmp_path: Path) -> None:
    """The row is missing, the log has the event, and the caller gets the usual response."""
    async with World(tmp_path) as world, admin_channel(world) as channel:
        await world.create(name="r", **NO_ROUND)

        def full(_: object) -> None:
            raise StoreFull("no room")

        world.store.add_history = full
        parts = [
            part async for part in admin_pb2_grpc.AdminStub(channel).ExportModel(pb.ExportModelRequest(run_id="r"))
        ]
        assert parts[0].header.size_bytes
        with pytest.raises(InvalidInput, match="task.name"):
            await world.create(name="evil", task={"name": "evil_task:Wine"})


def test_rows_are_allowed_again_with_time_and_count_the_omitted_ones() -> None:
    """A burst, then one for each interval. Each key has its own limit, and the number of keys is limited."""
    now = [0.0]
    rate = HistoryRate(2, 10.0, lambda: now[0])
    assert [rate.take("a") for _ in range(5)] == [0, 0, None, None, None]
    assert rate.take("b") == 0
    now[0] = 10.0
    assert [rate.take("a"), rate.take("a")] == [3, None]
    now[0] = 1e6
    assert [rate.take("a") for _ in range(3)] == [1, 0, None]
    for index in range(2 * MAX_KEYS):
        rate.take(index)
    assert len(rate._buckets) == MAX_KEYS


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("worn out", "worn out"),
        ("a\tb\r\nc\u2028d", "a b  c d"),
        ("\x1b[31mred\0\x07\u202e", "\ufffd[31mred\ufffd\ufffd\ufffd"),
        ("\U0001f600" * 400, "\U0001f600" * 250),
        ("x" * 5000, "x" * 1000),
    ],
)
def test_foreign_text_is_shortened_to_one_safe_line(text: str, shown: str) -> None:
    """White space becomes a space, control characters are replaced, and at most 1,000 bytes are kept."""
    assert one_line(text) == shown


async def test_operators_reasons_are_kept_on_one_line(tmp_path: Path) -> None:
    """Reasons of a ban, a drain and a stop, in the history, at clients and in terminals."""
    nasty, kept = "smoke\n\x1b[2J" + "x" * 5000, "smoke \ufffd[2J"
    async with World(tmp_path) as world:
        await world.operators.ban("edge-1", nasty, "admin")
        await world.operators.drain("edge-1", nasty, False, "admin")
        run = await world.create(**NO_ROUND)
        await world.coordinator.actions.stop(run, nasty, "admin")
        details = [row.detail for row in world.store.history() if row.detail.startswith("smoke")]
        assert len(details) >= 3
        assert all(detail.startswith(kept) and len(detail.encode()) <= 1000 for detail in details)
        assert world.fleet.records.get("edge-1").note.startswith(kept)


async def test_a_task_that_fails_while_its_run_is_restored_stops_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fl run show` gives the cause; the other runs go on, and the run is there again after a repair."""
    async with World(tmp_path) as world:
        for name in ("bad", "good"):
            await world.create(name=name, **NO_ROUND)
    with monkeypatch.context() as patch:
        load = ModelStore.load

        async def broken(store: ModelStore, *arguments: Any) -> Any:
            if store._run_id == "bad":
                raise TaskError("the task's model() failed: no module named 'weights'")
            return await load(store, *arguments)

        patch.setattr(ModelStore, "load", broken)
        async with World(tmp_path) as world:
            found = await listed_runs(world)
            assert "no module named 'weights'" in found["bad"][1]
            assert found["good"][0] == pb.RUN_STATE_WAITING
            async with admin_channel(world) as channel:
                shown = await admin_pb2_grpc.AdminStub(channel).GetRun(pb.GetRunRequest(run_id="bad"))
            assert "no module named 'weights'" in shown.run.reason
    async with World(tmp_path) as world:
        assert (await listed_runs(world))["bad"][0] == pb.RUN_STATE_WAITING
