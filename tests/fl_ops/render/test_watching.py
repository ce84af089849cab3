"""Watching a run: exit codes, lines, JSON lines, and the live table."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from fl_ops.render.watching import SHOWN_EVENTS, SHOWN_ROUNDS, LiveTable, RunProgress, event_line, show_until_end
from protos.fl.v1 import admin_pb2
from tests.fl_ops.conftest import FakeAdmin, Fl

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


def event_of(event: str, run: admin_pb2.RunStatus, **more: Any) -> admin_pb2.WatchRunResponse:
    """One event of a stream."""
    return admin_pb2.WatchRunResponse(event=event, run=run, **more)


def events_until(end: Any) -> list[admin_pb2.WatchRunResponse]:
    """The events of a run of one round that ends in this state."""
    return [
        event_of("snapshot", status(0, phase="collecting", cohort=["a", "b", "c"], cohort_size=3, admitted=1)),
        event_of("admitted", status(0, phase="collecting", cohort=["a", "b", "c"], cohort_size=3, admitted=2)),
        event_of("client_out", status(0), detail="c was lost"),
        event_of("committed", status(1), round=summary(0)),
        event_of("evaluated", status(1), round=summary(0, accuracy=0.9641, loss=0.125)),
        event_of("state", status(1, end, reason="because")),
    ]


def drawn(progress: RunProgress) -> str:
    """The live table as text."""
    text = io.StringIO()
    Console(file=text, width=120).print(LiveTable(progress))
    return text.getvalue()


def progress_of(events: list[admin_pb2.WatchRunResponse]) -> RunProgress:
    """The progress after these events."""
    progress = RunProgress()
    for event in events:
        progress.add(event)
    return progress


@pytest.mark.parametrize(("end", "code"), [(COMPLETED, 0), (STOPPED, 6), (FAILED, 7)])
def test_exit_codes(admin: FakeAdmin, fl: Fl, end: Any, code: int) -> None:
    """A watch exits as the run ended."""
    admin.responses["WatchRun"] = events_until(end)
    assert fl("run", "watch", "digits-1").exit_code == code


def test_stream_that_ends_early(admin: FakeAdmin, fl: Fl) -> None:
    """The watch notes the lost connection, opens the stream again, and ends as the run does."""
    streams = iter([events_until(COMPLETED)[:-1], events_until(STOPPED)[-1:]])
    admin.responses["WatchRun"] = OneAfterTheOther(streams)
    result = fl("run", "watch", "digits-1")
    assert result.exit_code == 6
    lost = "connection lost, waiting for the coordinator; Ctrl-C ends the watch, not the run"
    assert result.stdout.splitlines()[-2:] == [lost, "stopped: because"]


def test_a_lost_connection_in_json(admin: FakeAdmin, fl: Fl) -> None:
    """With --json stdout has objects only; the note is on stderr."""
    streams = iter([events_until(COMPLETED)[:2], events_until(COMPLETED)[-1:]])
    admin.responses["WatchRun"] = OneAfterTheOther(streams)
    result = fl("run", "watch", "digits-1", "--json")
    assert len([json.loads(line) for line in result.stdout.splitlines()]) == 3
    assert result.stderr.startswith("connection lost, waiting")


class OneAfterTheOther:
    """The events of a stream for each call."""

    def __init__(self, streams: Iterator[list[admin_pb2.WatchRunResponse]]) -> None:
        self._streams = streams

    def __iter__(self) -> Iterator[admin_pb2.WatchRunResponse]:
        return iter(next(self._streams))


def test_lines(admin: FakeAdmin, fl: Fl) -> None:
    """Without a terminal each event that matters is one line of plain text."""
    admin.responses["WatchRun"] = events_until(STOPPED)
    assert fl("run", "watch", "digits-1").stdout.splitlines() == [
        "watching digits-1: 0 rounds done",
        "client out: c was lost",
        "round 0 committed: 2 of 3 clients, 1.25 s, 3.0 MiB down, 1.5 KiB up",
        "round 0 evaluated: accuracy 96.41 %, held-out loss 0.125",
        "stopped: because",
    ]


def test_json_lines(admin: FakeAdmin, fl: Fl) -> None:
    """With --json every event is one object on a line, with protobuf's own field names."""
    admin.responses["WatchRun"] = events_until(COMPLETED)
    lines = [json.loads(line) for line in fl("run", "watch", "digits-1", "--json").stdout.splitlines()]
    assert [line["event"] for line in lines] == [event.event for event in events_until(COMPLETED)]
    assert lines[4]["round"]["metrics"]["accuracy"] == 0.9641
    assert lines[-1]["run"]["state"] == "RUN_STATE_COMPLETED"


def test_create_and_watch(admin: FakeAdmin, fl: Fl, tmp_path: Any) -> None:
    """`fl run create --watch` watches the new run and prints events only."""
    (tmp_path / "run.toml").write_text("seed = 1")
    admin.responses["CreateRun"] = admin_pb2.CreateRunResponse(run=status(0))
    admin.responses["WatchRun"] = events_until(FAILED)
    result = fl("run", "create", "run.toml", "--watch", "--json")
    assert result.exit_code == 7
    assert len(result.stdout.splitlines()) == len(events_until(FAILED))
    assert admin.requests[1] == admin_pb2.WatchRunRequest(run_id="digits-1")


def test_terminal() -> None:
    """On a terminal the table is drawn in place and its last state stays."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, legacy_windows=False)
    assert show_until_end(events_until(COMPLETED), False, console) == 0
    assert "96.41 %" in text.getvalue()


def test_table_of_a_round_under_way() -> None:
    """The round under way shows its phase and how many of the cohort have delivered."""
    text = drawn(progress_of(events_until(COMPLETED)[:1]))
    assert "collecting" in text
    assert "1/3" in text
    assert "0 of 40 rounds" in text


def test_table_of_a_committed_round() -> None:
    """A committed round shows clients, accuracy, loss, seconds and bytes in the reader's units."""
    text = drawn(progress_of(events_until(COMPLETED)[:5]))
    for expected in ("2/3", "96.41 %", "0.125", "1.25 s", "3.0 MiB", "1.5 KiB", "c was lost"):
        assert expected in text


def test_the_losses_have_a_column_each() -> None:
    """Before the evaluation there is only the training loss; the evaluation does not replace it."""
    before = progress_of(events_until(COMPLETED)[:4])
    assert [(row.metrics, row.training_loss) for row in before.rounds()] == [({}, 0.5)]
    after = progress_of(events_until(COMPLETED)[:5])
    assert [(row.metrics["loss"], row.training_loss) for row in after.rounds()] == [(0.125, 0.5)]
    text = drawn(after)
    for expected in ("Held-out loss", "Training loss", "0.125", "0.5"):
        assert expected in text


def test_bounded() -> None:
    """However long the run, only the latest rounds and events are kept."""
    progress = progress_of([
        event
        for n in range(100)
        for event in (event_of("client_out", status(n)), event_of("committed", status(n + 1), round=summary(n)))
    ])  # fmt: skip
    assert [row.round for row in progress.rounds()] == list(range(100 - SHOWN_ROUNDS, 100))
    assert list(progress.events) == ["client out"] * SHOWN_EVENTS, "the table has the rounds"


def test_snapshot_shows_the_latest_round() -> None:
    """A watch that begins in mid-run shows the latest committed round at once."""
    progress = progress_of([event_of("snapshot", status(12, latest=summary(11, accuracy=0.5)))])
    assert [(row.round, row.metrics) for row in progress.rounds()] == [(11, {"accuracy": 0.5})]


def test_a_snapshot_of_an_ended_run() -> None:
    """A watch that starts after the end shows the same line as one that saw the end."""
    run = status(12, COMPLETED, reason="12 rounds are done")
    assert event_line(event_of("snapshot", run)) == "completed: 12 rounds are done"
