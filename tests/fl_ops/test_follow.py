"""Following a run: exit codes, lines, JSON lines, and the live table."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from fl_ops.follow import follow
from fl_ops.tables import live_table
from fl_ops.watch import SHOWN_EVENTS, SHOWN_ROUNDS, RunProgress, event_line
from protos.fl.v1 import admin_pb2

COMPLETED, STOPPED, FAILED = (
    admin_pb2.RUN_STATE_COMPLETED,
    admin_pb2.RUN_STATE_STOPPED,
    admin_pb2.RUN_STATE_FAILED,
)


def status(done: int, state: Any = admin_pb2.RUN_STATE_RUNNING, **more: Any) -> admin_pb2.RunStatus:
    """A run of 40 rounds with this many done."""
    run = admin_pb2.RunStatus(run_id="digits-1", state=state, rounds_done=done, **more)
    run.spec.stop.rounds = 40
    return run


def summary(number: int, **metrics: float) -> admin_pb2.RoundSummary:
    """A committed round of 2 clients out of 3."""
    facts = admin_pb2.RoundSummary(round=number, seconds=1.25, accepted=2, dropped=1, metrics=metrics)
    facts.bytes_down, facts.bytes_up, facts.training_loss = 3 << 20, 1536, 0.5
    return facts


def seen(event: str, run: admin_pb2.RunStatus, **more: Any) -> admin_pb2.WatchRunResponse:
    """One event of a stream."""
    return admin_pb2.WatchRunResponse(event=event, run=run, **more)


def story(end: Any) -> list[admin_pb2.WatchRunResponse]:
    """A run that is watched through one round to its end."""
    return [
        seen("snapshot", status(0, phase="collecting", cohort=["a", "b", "c"], admitted=1)),
        seen("admitted", status(0, phase="collecting", cohort=["a", "b", "c"], admitted=2)),
        seen("client_out", status(0), detail="c was lost"),
        seen("committed", status(1), round=summary(0)),
        seen("evaluated", status(1), round=summary(0, accuracy=0.9641, loss=0.125)),
        seen("state", status(1, end, reason="because")),
    ]


def drawn(progress: RunProgress) -> str:
    """The live table as text."""
    console = Console(file=io.StringIO(), width=120)
    console.print(live_table([progress]))
    return console.file.getvalue()  # type: ignore[attr-defined]


def progress_of(events: list[admin_pb2.WatchRunResponse]) -> RunProgress:
    """What a watcher knows after these events."""
    progress = RunProgress()
    for event in events:
        progress.feed(event)
    return progress


@pytest.mark.parametrize(("end", "code"), [(COMPLETED, 0), (STOPPED, 6), (FAILED, 7)])
def test_exit_codes(admin: Any, fl: Any, end: Any, code: int) -> None:
    """A watch exits as the run ended."""
    admin.answers["WatchRun"] = story(end)
    assert fl("run", "watch", "digits-1").exit_code == code


def test_stream_that_ends_early(admin: Any, fl: Any) -> None:
    """A stream that ends before the run is no success: the coordinator went away."""
    admin.answers["WatchRun"] = story(COMPLETED)[:-1]
    result = fl("run", "watch", "digits-1")
    assert result.exit_code == 3
    assert "ended the stream while the run was running" in result.stderr


def test_lines(admin: Any, fl: Any) -> None:
    """Without a terminal each event that matters is one line of plain text."""
    admin.answers["WatchRun"] = story(STOPPED)
    assert fl("run", "watch", "digits-1").stdout.splitlines() == [
        "watching digits-1: 0 rounds done",
        "client out: c was lost",
        "round 0 committed: 2 of 3 clients, 1.25 s, 3.0 MiB down, 1.5 KiB up",
        "round 0 evaluated: accuracy 0.9641, loss 0.1250",
        "stopped: because",
    ]


def test_json_lines(admin: Any, fl: Any) -> None:
    """With --json every event is one object on a line, with protobuf's own field names."""
    admin.answers["WatchRun"] = story(COMPLETED)
    lines = [json.loads(line) for line in fl("run", "watch", "digits-1", "--json").stdout.splitlines()]
    assert [line["event"] for line in lines] == [event.event for event in story(COMPLETED)]
    assert lines[4]["round"]["metrics"]["accuracy"] == 0.9641
    assert lines[-1]["run"]["state"] == "RUN_STATE_COMPLETED"


def test_create_and_watch(admin: Any, fl: Any, tmp_path: Any) -> None:
    """`fl run create --watch` follows the run that it made and prints nothing but events."""
    (tmp_path / "run.toml").write_text("seed = 1")
    admin.answers["CreateRun"] = admin_pb2.CreateRunResponse(run=status(0))
    admin.answers["WatchRun"] = story(FAILED)
    result = fl("run", "create", "run.toml", "--watch", "--json")
    assert result.exit_code == 7
    assert len(result.stdout.splitlines()) == len(story(FAILED))
    assert admin.requests[1] == admin_pb2.WatchRunRequest(run_id="digits-1")


def test_terminal() -> None:
    """On a terminal the table is drawn in place and its last state stays."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, legacy_windows=False)
    assert follow(story(COMPLETED), False, console) == 0
    assert "96.41 %" in console.file.getvalue()  # type: ignore[attr-defined]


def test_table_of_a_round_under_way() -> None:
    """The round under way shows its phase and how many of the cohort have delivered."""
    text = drawn(progress_of(story(COMPLETED)[:1]))
    assert "collecting" in text
    assert "1/3" in text
    assert "0 of 40 rounds" in text


def test_table_of_a_committed_round() -> None:
    """A committed round shows clients, accuracy, loss, seconds and bytes in the reader's units."""
    text = drawn(progress_of(story(COMPLETED)[:5]))
    for expected in ("2/3", "96.41 %", "0.1250", "1.25 s", "3.0 MiB", "1.5 KiB", "c was lost"):
        assert expected in text


def test_training_loss_until_evaluated() -> None:
    """Before the evaluation is there, the loss is that of training."""
    (row,) = progress_of(story(COMPLETED)[:4]).rows()
    assert (row.accuracy, row.loss) == (None, 0.5)


def test_bounded() -> None:
    """However long the run, a watcher keeps the latest rounds and events only."""
    progress = progress_of([seen("committed", status(n + 1), round=summary(n)) for n in range(100)])
    assert [row.round for row in progress.rows()] == list(range(100 - SHOWN_ROUNDS, 100))
    assert len(progress.events) == SHOWN_EVENTS


def test_snapshot_shows_the_latest_round() -> None:
    """A watch that begins in mid-run shows the latest committed round at once."""
    progress = progress_of([seen("snapshot", status(12, latest=summary(11, accuracy=0.5)))])
    assert [(row.round, row.accuracy) for row in progress.rows()] == [(11, 0.5)]


def test_a_run_that_has_ended_is_told_as_ended() -> None:
    """Who begins to watch after the end reads the same words as who watched it end."""
    run = status(12, COMPLETED, reason="12 rounds are done")
    assert event_line(seen("snapshot", run)) == "completed: 12 rounds are done"
