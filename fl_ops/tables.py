"""Messages of the Admin service as rich tables. Rendering only: nothing here calls or waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fl_ops import units
from fl_ops.accounts import health_rows, lowest_loss, short, updates_norms
from fl_ops.reaching import Reaching
from fl_ops.states import client_state, member_rows, run_state
from fl_ops.units import NOTHING
from fl_ops.watch import Row, RunProgress
from protos.fl.v1 import admin_pb2

_STATE_STYLES = {
    "running": "green",
    "present": "green",
    "completed": "bold green",
    "waiting": "yellow",
    "paused": "yellow",
    "suspect": "yellow",
    "failed": "bold red",
    "not loaded": "bold red",
    "banned": "red",
}


def rounds_text(run: admin_pb2.RunStatus) -> str:
    """Committed rounds of those wanted: 12 of 40."""
    return f"{run.rounds_done} of {run.spec.stop.rounds}" if run.spec.stop.rounds else str(run.rounds_done)


def runs_table(runs: Sequence[admin_pb2.RunStatus]) -> RenderableType:
    """All runs, one a line."""
    table = table_of("Run", "State", "Task", "Algorithm", ">Rounds", ">Best", ">Down", ">Up", "Created")
    for run in runs:
        table.add_row(
            _text(run.run_id), _state(run_state(run)), _text(run.spec.task.name), _text(run.spec.algorithm.name),
            rounds_text(run), _text(_quality(run, run.best)), units.size(run.bytes_down), units.size(run.bytes_up),
            units.moment(run.created),
        )  # fmt: skip
    if not runs:
        return Text("no runs yet: `fl run create config.toml` makes one")
    problems = [run for run in runs if run.state == admin_pb2.RUN_STATE_UNSPECIFIED]
    return Group(table, *(_text(f"{run.run_id}: {run.reason}") for run in problems)) if problems else table


def run_details(
    answer: admin_pb2.GetRunResponse, reaching: Reaching | None = None, *, accounts: bool = False
) -> RenderableType:
    """One run: what it is, where it stands, what a target took, and its committed rounds; what those came to."""
    rows = [Row.committed(summary) for summary in answer.rounds]
    more = [accounts_table(answer.rounds)] if accounts else []
    return Group(run_summary(answer.run, reaching), rounds_table(rows), *more)


def run_summary(run: admin_pb2.RunStatus, reaching: Reaching | None = None) -> RenderableType:
    """One run as names and values."""
    grid = Table.grid(padding=(0, 2))
    cohort = f"{run.admitted}/{len(run.cohort)} updates of {', '.join(run.cohort)}" if run.cohort else ""
    rows: list[tuple[str, str | Text]] = [
        ("run", _text(run.run_id)),
        ("state", _state(run_state(run))),
        ("why", _text(run.reason)),
        ("task", _text(run.spec.task.name)),
        ("algorithm", _text(run.spec.algorithm.name)),
        ("rounds", rounds_text(run)),
        ("phase", _text(f"{run.phase}, attempt {run.attempt}" if run.phase else "")),
        ("cohort", _text(cohort)),
        ("eligible clients", str(run.eligible_clients)),
        ("over-selection", f"{run.over_selection:.2f} clients for each update" if run.over_selection > 1 else ""),
        *((name, _text(words)) for name, words in member_rows(run)),
        ("best", _text(best_of(run))),
        ("target", _text(reaching.words() if reaching else "")),
        *((name, _text(words)) for name, words in health_rows(run)),
        ("bytes", f"{units.size(run.bytes_down)} down, {units.size(run.bytes_up)} up"),
        ("created", units.moment(run.created)),
        ("ended", units.moment(run.ended)),
    ]
    for name, value in rows:
        if str(value) not in ("", NOTHING):
            grid.add_row(name, value)
    return grid


def best_of(run: admin_pb2.RunStatus) -> str:
    """The best round by the run's metric, and the lowest loss."""
    best = f"{_quality(run, run.best)} in round {run.best.round}" if run.HasField("best") else ""
    return ", ".join(filter(None, (best, lowest_loss(run))))


def accounts_table(rounds: Sequence[admin_pb2.RoundSummary]) -> Table:
    """What each round came to beside its model, one a line."""
    table = table_of(
        ">Round", ">Attempts", ">Updates' norms", ">Step", ">Direction", ">Cosine", ">Refused", ">Failed", ">Lost",
        ">Late", ">Collecting", ">Else",
    )  # fmt: skip
    for summary in rounds:
        account, seconds = summary.account, dict(summary.account.seconds)
        collecting = seconds.pop("collecting", 0.0)
        table.add_row(
            str(summary.round), str(summary.attempts), updates_norms(account.norms) or NOTHING,
            *(short(account.norms[of]) if of in account.norms else NOTHING for of in ("aggregate", "direction")),
            f"{account.cosine:.2f}" if account.HasField("cosine") else NOTHING,
            *(str(account.assignments.get(state, 0)) for state in ("refused", "failed", "lost")),
            str(sum(count for age, count in account.staleness.items() if age)),
            *(units.duration(each) if account.seconds else NOTHING for each in (collecting, sum(seconds.values()))),
        )  # fmt: skip
    return table


def rounds_table(rows: Sequence[Row]) -> Table:
    """Rounds, one a line; what clients found has its columns where there is any."""
    found = (">On clients", ">Worst 10 %") if any(row.on_clients is not None for row in rows) else ()
    table = table_of(">Round", "Phase", ">Clients", ">Accuracy", ">Loss", *found, ">Time", ">Down", ">Up")
    for row in rows:
        clients = (_spread(row), units.percent(row.worst_decile)) if found else ()
        table.add_row(
            str(row.round), _text(row.phase), f"{row.admitted}/{row.cohort}", units.percent(row.accuracy),
            _number(row.loss), *clients, NOTHING if row.seconds is None else units.duration(row.seconds),
            _size(row.bytes_down), _size(row.bytes_up),
        )  # fmt: skip
    return table


def _spread(row: Row) -> str:
    """Mean and deviation of the accuracy over clients: 81.20 ± 3.10 %."""
    if row.on_clients is None:
        return NOTHING
    mean, deviation = row.on_clients
    return f"{100 * mean:.2f} ± {100 * deviation:.2f} %"


def live_table(runs: Iterable[RunProgress]) -> RenderableType:
    """What runs are doing now: the latest rounds of each, its sums and its last events. Fed by `RunProgress.feed`."""
    return Group(*(part for progress in runs for part in _live(progress)))


def _live(progress: RunProgress) -> list[RenderableType]:
    run = progress.run
    table = rounds_table(progress.rows())
    title = f"{run.run_id}  {run_state(run)}  {rounds_text(run)} rounds  {run.eligible_clients} clients eligible"
    table.title = Text(units.plain(title), style="bold")
    best = f"best {_quality(run, run.best)} in round {run.best.round}, " if run.HasField("best") else ""
    table.caption = Text(f"{best}{units.size(run.bytes_down)} down, {units.size(run.bytes_up)} up in all")
    return [table, *(Text(units.plain(line), style="dim") for line in progress.events)]


def clients_table(clients: Sequence[admin_pb2.ClientStatus]) -> RenderableType:
    """All clients, one a line."""
    table = table_of("Client", "State", "Device", "Tasks", "Run", ">Counted", ">Refused", "Last seen", "Labels", "Note")
    for client in clients:
        table.add_row(
            _text(client.client_id), _state(client_state(client)), _text(client.device.name or client.device.kind),
            _text(", ".join(f"{offer.name} ({offer.train_examples:,})" for offer in client.tasks)),
            _text(client.run_id or NOTHING), f"{client.updates_counted:,}", f"{client.updates_refused:,}",
            units.moment(client.last_seen),
            _text(" ".join(f"{key}={client.labels[key]}" for key in sorted(client.labels))),
            _text(client.quarantine.reason or _said(client) or client.note),
        )  # fmt: skip
    return table if clients else Text("no clients yet: `fl-client --config client.toml` starts one")


def _said(client: admin_pb2.ClientStatus) -> str:
    """Why it may not train, in its own words."""
    return "" if client.availability.may_train else client.availability.detail


def history_table(entries: Sequence[admin_pb2.HistoryEntry]) -> RenderableType:
    """State changes, oldest first."""
    table = table_of("When", "Who", "What", "Why")
    for entry in entries:
        table.add_row(units.moment(entry.time), _text(entry.actor), _text(entry.event), _text(entry.detail))
    return table if entries else Text("nothing has happened yet")


def table_of(*columns: str) -> Table:
    """An empty table; a column whose name starts with > holds numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def _text(value: str) -> Text:
    """Text from elsewhere: shown as it is, markup and control characters have no effect."""
    return Text(units.plain(value))


def _state(name: str) -> Text:
    return Text(name, style=_STATE_STYLES.get(name.partition(",")[0], ""))


def _size(count: int | None) -> str:
    return NOTHING if count is None else units.size(count)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _quality(run: admin_pb2.RunStatus, summary: admin_pb2.RoundSummary) -> str:
    """A round's accuracy, or the metric that the run stops by."""
    metric = run.spec.stop.metric or "accuracy"
    if metric not in summary.metrics:
        return NOTHING
    value = summary.metrics[metric]
    return units.percent(value) if metric == "accuracy" else f"{metric} {value:.4g}"
