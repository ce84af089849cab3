"""Every table on terminals of 80 and 100 columns, and in a pipe: no cell is cut, and the newest rounds stay."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from fl_ops.commands.local.partition import _table as partition_table
from fl_ops.render import tables
from fl_ops.render.rounds import evaluations_table
from fl_ops.render.watching import LiveTable, RunProgress
from protos.fl.v1 import admin_pb2
from tests.fl_ops.conftest import FakeAdmin, Fl

WIDTHS = pytest.mark.parametrize("width", [80, 100])
TIME = 1_790_000_000


def drawn(rendering: RenderableType, width: int, height: int = 24) -> list[str]:
    """The lines of a rendering on a terminal of this size."""
    console = Console(file=io.StringIO(), width=width, height=height, legacy_windows=False, color_system=None)
    with console.capture() as capture:
        console.print(rendering)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert all(len(line) <= width for line in lines), lines
    assert not any("…" in line or "..." in line for line in lines), lines
    return lines


def clients() -> list[admin_pb2.ClientStatus]:
    """Three clients with every column filled."""
    found = []
    for index, name in enumerate(("edge-000", "edge-berlin-kreuzberg-17", "edge-2")):
        client = admin_pb2.ClientStatus(client_id=name, state=admin_pb2.CLIENT_STATE_PRESENT, run_id="digits-fedcm")
        client.tasks.add(name="digits", train_examples=180)
        client.labels["site"], client.labels["ward"] = "berlin", "north"
        client.device.name, client.updates_counted, client.updates_refused = "NVIDIA Jetson Orin Nano", 1234, index
        client.last_seen.seconds = TIME
        found.append(client)
    found[1].note = "not_finite: the update's norm is nan; the model of the round before stays"
    return found


def runs() -> list[admin_pb2.RunStatus]:
    """A run that collects, and one that waits."""
    run = admin_pb2.RunStatus(run_id="digits-fedcm-2", state=admin_pb2.RUN_STATE_RUNNING, rounds_done=12)
    run.spec.task.name, run.spec.algorithm.name, run.spec.stop.rounds = "digits", "fedcm", 40
    run.spec.stop.metric, run.spec.stop.lower_is_better = "accuracy", False
    run.best.round, run.best.metrics["accuracy"] = 11, 0.9641
    run.bytes_down, run.bytes_up, run.created.seconds = 5 << 20, 4 << 20, TIME
    run.phase, run.admitted, run.awaited_count, run.deadline_left_s = "collecting", 1, 1, 252.0
    run.awaited.append("edge-3")
    run.cohort.extend(["edge-2", "edge-3"])
    run.cohort_size = 2
    waiting = admin_pb2.RunStatus(run_id="wine", state=admin_pb2.RUN_STATE_WAITING, phase="selecting")
    waiting.spec.task.name, waiting.waiting_for = "my_task:Wine", "clients with the task 'my_task:Wine': 0 of 3 here"
    return [run, waiting]


def round_of(number: int) -> admin_pb2.RoundSummary:
    """A round with every column filled."""
    metrics = {"accuracy": 0.9641, "loss": 0.1234, "clients_accuracy_mean": 0.81, "clients_accuracy_std": 0.03,
               "clients_accuracy_worst_decile": 0.7}  # fmt: skip
    row = admin_pb2.RoundSummary(round=number, accepted=98, dropped=2, seconds=61.0, metrics=metrics, attempts=1)
    row.training_loss, row.bytes_down, row.bytes_up = 0.4321, 3 << 20, 2 << 20
    row.account.norms.update({"update": 0.31, "update_smallest": 0.2, "update_largest": 0.55, "aggregate": 0.2})
    row.account.norms["direction"], row.account.cosine, row.account.seconds["collecting"] = 0.9, 0.73, 59.0
    return row


@WIDTHS
def test_clients(width: int) -> None:
    """Names, states and counts are whole, and a note goes on in the next line; a line names what is left out."""
    lines = drawn(tables.clients_table(clients()), width)
    for name in ("edge-000", "edge-berlin-kreuzberg-17", "edge-2"):
        assert any(line.startswith(name) and "present" in line and "1,234" in line for line in lines), name
    assert "Labels" in lines[-1]
    assert lines[-1].startswith("wider terminals also show: ")


def test_a_wide_column_takes_no_place_of_narrow_ones() -> None:
    """A task with a long name is left out at 80 columns, and what fits beside the others is there."""
    client = admin_pb2.ClientStatus(client_id="edge-0", state=admin_pb2.CLIENT_STATE_PRESENT)
    client.tasks.add(name="our." + "hospital." * 7 + "tasks:Beds", train_examples=180)
    client.labels["site"], client.last_seen.seconds, client.device.name = "berlin", TIME, "Orin"
    [names, _, missing] = drawn(tables.clients_table([client]), 80)
    assert missing == "wider terminals also show: Tasks"
    assert [name for name in ("State", "Device", "Last seen", "Labels") if name not in names] == []


@WIDTHS
def test_runs(width: int) -> None:
    """State, progress and the best value are whole, and the current phase is there; a waiting run has its reason."""
    text = "\n".join(drawn(tables.runs_table(runs()), width))
    for expected in ("digits-fedcm-2", "running", "12 of 40", "96.41 %", "collecting 1/2, 4 min 12 s left", "0 of 3"):
        assert expected in text


@WIDTHS
def test_a_run(width: int) -> None:
    """A round is one line with both losses. The summary has the awaited client and its deadline."""
    response = admin_pb2.GetRunResponse(run=runs()[0], rounds=[round_of(n) for n in range(3)])
    lines = drawn(tables.run_details(response, details=True), width)
    assert [line.split()[:7] for line in lines if "committed" in line] == [
        [str(number), "committed", "98/100", "96.41", "%", "0.1234", "0.4321"] for number in range(3)
    ]
    assert any(line.split(maxsplit=1) == ["awaited", "edge-3, for at most 4 min 12 s"] for line in lines)


@WIDTHS
def test_evaluations_history_and_results(width: int) -> None:
    """Other tables lose no digit either."""
    evaluations = admin_pb2.ListEvaluationsResponse(round=round_of(3))
    metrics = {f"metric_number_{n}": 0.5 for n in range(9)} | {"accuracy": 0.75}
    evaluations.evaluations.add(client_id="edge-3", num_examples=100, metrics=metrics)
    assert "75.00 %" in "\n".join(drawn(evaluations_table(evaluations), width))
    entry = admin_pb2.HistoryEntry(actor="admin:alice", event="client_quarantined", detail="why " * 40)
    text = "\n".join(drawn(tables.history_table([entry]), width))
    assert text.count("why") == 40
    assert "client_quarantined" in text


@WIDTHS
def test_a_partition(width: int) -> None:
    """With too many classes for the width, the number of each client's classes is shown."""
    assert "Classes" not in drawn(partition_table([[10] * 5]), width)[0]
    assert "Classes" in drawn(partition_table([[100_000] * 20]), width)[0]


@WIDTHS
@pytest.mark.parametrize("height", [10, 24])
def test_a_watched_run(width: int, height: int) -> None:
    """The whole live table fits the terminal; the current round, the best value and the awaited client are in it."""
    progress = RunProgress()
    for number in range(30):
        run = runs()[0]
        run.rounds_done = number + 1
        event = admin_pb2.WatchRunResponse(run=run, event="committed", round=round_of(number), detail="long " * 40)
        progress.add(event)
    console = Console(file=io.StringIO(), width=width, height=height, legacy_windows=False, color_system=None)
    with console.capture() as capture:
        console.print(LiveTable(progress))
    lines = capture.get().splitlines()
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    assert [line.split()[:2] for line in lines if "98/100" in line or " 1/2 " in line][-2:] == [
        ["29", "committed"],
        ["30", "collecting"],
    ]
    text = "\n".join(lines)
    assert "best 96.41 % in round 11" in text
    assert "collecting: waiting for edge-3, for at most 4 min 1" in text


def test_what_a_watched_run_waits_for_is_whole() -> None:
    """On a terminal of 80x24 a long sentence and the failure of a client take the lines that they need."""
    lacking = (
        "clients with the labels site=depot, size=large: 0 of 6 with the task 'my_task:Wine' have them; offered: site=x"
    )
    run = admin_pb2.RunStatus(run_id="wine", state=admin_pb2.RUN_STATE_WAITING, phase="selecting", waiting_for=lacking)
    progress, why = (
        RunProgress(),
        "edge-3: task_error: RuntimeError: camera 2: no frame within 500 ms (wine.py, line 11)",
    )
    for number in range(30):
        progress.add(admin_pb2.WatchRunResponse(event="committed", run=run, round=round_of(number)))
    progress.add(admin_pb2.WatchRunResponse(event="client_out", run=run, detail=why))
    lines = drawn(LiveTable(progress), 80)
    assert len(lines) < 24
    text = " ".join(lines)
    assert f"waiting for {lacking}" in text
    assert why in text


def test_a_pipe_has_everything(admin: FakeAdmin, fl: Fl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal a row is one line with every column, however long the values are."""
    monkeypatch.delenv("COLUMNS")
    listed = clients()
    listed[0].note = "x" * 3_000
    admin.responses["ListClients"] = admin_pb2.ListClientsResponse(clients=listed)
    lines = fl("clients", "list").stdout.splitlines()
    assert len(lines) == 1 + len(listed)
    assert listed[0].note in lines[1]
    assert not [line for line in lines if line.endswith((" ", "─"))], "no line is filled up to the longest"
    assert all(name in lines[0] for name in ("Client", "Device", "Tasks", "Labels", "Note"))
