"""`fl` with a coordinator of 5,000 clients and a run of 2,500 rounds; deletion of another run across SIGKILL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from fl_ops.errors import NotFound
from fl_server.rounds.metrics import EVALUATED, STATISTICS
from fl_server.run.round_statistics import RoundStatistics
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import from_values
from fl_server.store.database import schema
from fl_server.store.database.store import open_ledger, open_read_only
from fl_server.store.database.transactions import to_row
from fl_server.store.records import AttemptRecord, ClientRecord, CommitRecord, HistoryRecord, RunRecord
from fl_server.store.state_directory import lock_directory
from protos.fl.v1 import admin_pb2
from protos.wire import MAX_MESSAGE_BYTES
from tests.processes.federation import TASK, Coordinator
from tests.processes.process import Workspace, run_fl

CLIENTS, ROUNDS = 5_000, 2_500
METRICS = {f"accuracy_of_{number:02}_{120 * 'x'}": 0.5 for number in range(18)}
LABELS = {"site": "a-hospital-with-a-long-name", "about": "x" * 1_000}
"""With these sizes one message of at most 5 MiB cannot hold all clients, nor all rounds."""
DELETED, DELETED_ROUNDS = "short-lived", 10_000
"""An ended run for the tests of deletion, with so many rounds that SIGKILL arrives before its end."""
OFFER = {"name": TASK, "version": "1", "source": "sha256:" + 64 * "0", "train_examples": 600, "eval_examples": 60}
DEVICE = {"kind": "cuda", "name": "NVIDIA Jetson Orin Nano Developer Kit", "memory_bytes": 8 << 30}
PHASES = ("selecting", "collecting", "stepping", "committing", "evaluating")


def config() -> RunConfig:
    """The configuration of the run."""
    values = {"task": {"name": TASK}, "algorithm": {"name": "fedavg"}, "stop": {"rounds": ROUNDS}}
    return from_values({"name": "long", "local": {"steps": 1}, "round": {"clients_per_round": 2}, **values})


def fill(state: Path) -> None:
    """Write the ledger. In large transactions, because the store's own calls would take a minute."""
    with lock_directory(state) as lock:
        store = open_ledger(None, state, home=lock.home)
        lock.keep_ledger(store.coordinator_id)
        spec = config().model_dump(exclude_none=True)
        for name, created in ((DELETED, 5.0), ("long", 10.0)):
            ended = RunRecord(name, spec, "completed", "all rounds are done", created, 20.0)
            store.create_run(ended, HistoryRecord(created, "admin:eve", "run_created", name))
        clients = (
            ClientRecord(f"edge-{number:05}", 1.0, 2.0, labels=LABELS, device=DEVICE, tasks=(OFFER,))
            for number in range(CLIENTS)
        )
        lengths = {"long": ROUNDS, DELETED: DELETED_ROUNDS}
        rounds = [(run, number) for run, length in lengths.items() for number in range(length)]
        attempts = (AttemptRecord(run, number, 0, 0, ("a", "b"), 11.0) for run, number in rounds)
        statistics = RoundStatistics({"update": 0.5, "update_smallest": 0.4, "update_largest": 0.6, "aggregate": 0.3})
        statistics.seconds = dict.fromkeys(PHASES, 1.234)
        commit = CommitRecord("long", 0, 12.0, 1.0, 1, 2, 0, 0.5, 7, 9, "blake3:" + 64 * "0")
        names = [f"clients_{metric}_{suffix}" for metric in ("accuracy", "loss") for suffix in STATISTICS.values()]
        metrics = dict.fromkeys(["accuracy", "loss", "clients_accuracy", "clients_loss", EVALUATED, *names], 0.5)
        long = replace(commit, metrics={**metrics, **METRICS}, statistics=statistics.to_text())
        commits = (replace(long if run == "long" else commit, run_id=run, round=number) for run, number in rounds)
        lines = (
            HistoryRecord(12.0, "coordinator", "round_committed", run, f"round {number}") for run, number in rounds
        )
        with store._transaction("fill the ledger") as db:
            for table, records in (
                (schema.clients, clients), (schema.attempts, attempts), (schema.commits, commits),
                (schema.history, lines),
            ):  # fmt: skip
                db.execute(insert(table), [to_row(record) for record in records])
        store.close()
    (state / "checkpoints" / f"run-{DELETED}").mkdir(parents=True)
    (state / "checkpoints" / f"run-{DELETED}" / "left-over").touch()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator on that ledger."""
    with Workspace(tmp_path_factory.mktemp("long")) as workspace:
        server = Coordinator(workspace)
        fill(Path(server.settings["state_dir"]))
        yield server.serve()


def fl(server: Coordinator, *arguments: str) -> Any:
    """The JSON that a command prints."""
    connection = ("--insecure", "--server", str(server.settings["admin_listen"]))
    done = run_fl(*arguments, "--json", *connection, folder=server.folder, within_s=240.0)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_all_clients_and_rounds_are_listed(server: Coordinator) -> None:
    """Each once and in order, in as many pages as it takes."""
    clients = fl(server, "clients", "list")
    assert [client["client_id"] for client in clients] == [f"edge-{number:05}" for number in range(CLIENTS)]
    assert clients[-1]["labels"] == LABELS
    run = fl(server, "run", "show", "long")
    with server.admin() as admin:
        assert sum(each.ByteSize() for each in admin.runs.get_run("long").rounds) > MAX_MESSAGE_BYTES
        assert sum(each.ByteSize() for each in admin.clients.list_clients()) > MAX_MESSAGE_BYTES
    assert [summary["round"] for summary in run["rounds"]] == list(range(ROUNDS))
    assert run["run"]["rounds_done"] == ROUNDS
    history = fl(server, "run", "history", "long", "--limit", "20000")
    assert [line["event"] for line in history] == ["run_created", *["round_committed"] * ROUNDS]


@pytest.mark.slow
def test_a_few_are_listed(server: Coordinator) -> None:
    """The newest rounds, the first clients, and clients by label and state."""
    run = fl(server, "run", "show", "long", "--limit", "3")
    assert [summary["round"] for summary in run["rounds"]] == [ROUNDS - 3, ROUNDS - 2, ROUNDS - 1]
    few = fl(server, "clients", "list", "--limit", "2", "--label", f"site={LABELS['site']}", "--state", "lost")
    assert [client["client_id"] for client in few] == ["edge-00000", "edge-00001"]
    assert fl(server, "clients", "list", "--state", "present") == []
    assert [run["run_id"] for run in fl(server, "run", "list", "--limit", "1")] == ["long"]


@pytest.mark.slow
def test_a_deletion_asks_for_consent(server: Coordinator) -> None:
    """Without a terminal to ask on, `--yes` is needed."""
    connection = ("--insecure", "--server", str(server.settings["admin_listen"]))
    done = run_fl("run", "delete", "long", *connection, folder=server.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected a terminal to ask on, or --yes" in done.stderr


@pytest.mark.slow
def test_a_killed_coordinator_completes_the_deletion(server: Coordinator) -> None:
    """SIGKILL as soon as the run is marked: the next start removes the rest, and only a line of history stays."""
    state = Path(server.settings["state_dir"])
    with server.admin() as admin, ThreadPoolExecutor(1) as pool:
        request = admin_pb2.DeleteRunRequest(run_id=DELETED, reason="too long")
        call = pool.submit(admin.call, request, admin_pb2.DeleteRunResponse)
        server.logged("run_deleted")
        server.kill()
        assert call.exception() is not None
    server.serve()
    server.logged("run_removed")
    with server.admin() as admin:
        assert [run.run_id for run in admin.runs.list_runs()] == ["long"]
        with pytest.raises(NotFound):
            admin.runs.get_run(DELETED)
        assert [(line.actor, line.event, line.detail) for line in admin.history.list_history(DELETED, 0)][1:] == [
            ("admin", "run_deleted", "too long"),
            ("coordinator", "run_removed", "all data of the run is removed"),
        ]
    assert not (state / "checkpoints" / f"run-{DELETED}").exists()
    store = open_read_only(state)
    assert (store.commits(DELETED), store.deleted_runs()) == ([], [DELETED])
    assert store.attempts(DELETED, DELETED_ROUNDS - 1) == []
    store.close()
