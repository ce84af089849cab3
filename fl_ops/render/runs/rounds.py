"""Tables of a run's rounds."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from fl_common import units
from fl_common.units import NOTHING
from fl_ops.render.fitted import FittedTable
from fl_ops.render.runs.criterion import ACCURACY
from fl_ops.render.runs.health import short, update_norms, value
from fl_ops.render.runs.progress import Row
from protos.fl.v1 import admin_pb2


def rounds_table(rows: Sequence[Row], metric: str = ACCURACY, *, names_missing: bool = True) -> FittedTable:
    """A row for each round. Columns for the clients' evaluations only if there are any.

    metric: of the column beside the loss.
    """
    client_columns = (
        (">On clients", ">Worst 10 %") if any(f"clients_{metric}_mean" in row.metrics for row in rows) else ()
    )
    name = units.plain(metric.replace("_", " "))
    table = FittedTable(
        (">Round", "Phase", ">Clients", f">{name[:1].upper()}{name[1:]}", ">Held-out loss", ">Training loss",
         *client_columns, ">Time", ">Down", ">Up"),
        optional=("Up", "Down", *(name.removeprefix(">") for name in reversed(client_columns)), "Time",
                  "Training loss", "Held-out loss"),
        names_missing=names_missing,
    )  # fmt: skip
    for row in rows:
        worst = row.metrics.get(f"clients_{metric}_worst_decile")
        clients = (_spread(row, metric), _value(metric, worst)) if client_columns else ()
        table.add_row(
            str(row.round), Text(units.plain(row.phase)), f"{row.admitted}/{row.cohort}",
            _value(metric, row.metrics.get(metric)), _number(row.metrics.get("loss")), _number(row.training_loss),
            *clients,
            NOTHING if row.seconds is None else units.duration(row.seconds),
            _size(row.bytes_down), _size(row.bytes_up),
        )  # fmt: skip
    return table


def round_details_table(rounds: Sequence[admin_pb2.RoundSummary]) -> FittedTable:
    """A row for each round: norms, drop-outs and durations."""
    table = FittedTable(
        (">Round", ">Attempts", ">Update norms", ">Step", ">Direction", ">Cosine", ">Refused", ">Failed", ">Lost",
         ">Late", ">Collecting", ">Other"),
        optional=("Other", "Late", "Attempts", "Cosine", "Direction", "Step", "Collecting"),
    )  # fmt: skip
    for summary in rounds:
        account, seconds = summary.account, dict(summary.account.seconds)
        collecting = seconds.pop("collecting", 0.0)
        table.add_row(
            str(summary.round), str(summary.attempts), update_norms(account.norms) or NOTHING,
            *(short(account.norms[of]) if of in account.norms else NOTHING for of in ("aggregate", "direction")),
            f"{account.cosine:.2f}" if account.HasField("cosine") else NOTHING,
            *(str(account.assignments.get(state, 0)) for state in ("refused", "failed", "lost")),
            str(sum(count for age, count in account.staleness.items() if age)),
            *(units.duration(each) if account.seconds else NOTHING for each in (collecting, sum(seconds.values()))),
        )  # fmt: skip
    return table


def local_epochs_table(rounds: Sequence[admin_pb2.RoundSummary]) -> FittedTable:
    """A row for each round and metric that clients measured in their local epochs, with the values in order."""
    table = FittedTable((">Round", "Metric", "In each local epoch"))
    for summary in rounds:
        names = sorted({name for epoch in summary.local_epochs for name in epoch.values})
        for name in names:
            values = [epoch.values.get(name) for epoch in summary.local_epochs]
            table.add_row(str(summary.round), Text(units.plain(name)), _shortened([_number(value) for value in values]))
    return table


def _shortened(values: Sequence[str]) -> str:
    """All values, or the first and the last ones of many."""
    if len(values) > 2 * _EPOCHS_SHOWN:
        values = [*values[:_EPOCHS_SHOWN], "...", *values[-_EPOCHS_SHOWN:]]
    return " ".join(values)


_EPOCHS_SHOWN = 5
"""First and last epochs of a round with many."""


def _spread(row: Row, metric: str) -> str:
    """Mean and deviation of the metric over clients: 81.20 ± 3.10 %."""
    mean, deviation = (row.metrics.get(f"clients_{metric}_{of}") for of in ("mean", "std"))
    if mean is None or deviation is None:
        return NOTHING
    if metric == ACCURACY:
        return f"{100 * mean:.2f} ± {100 * deviation:.2f} %"
    return f"{short(mean)} ± {short(deviation)}"


def _value(metric: str, number: float | None) -> str:
    return NOTHING if number is None else value(metric, number)


def _size(count: int | None) -> str:
    return NOTHING if count is None else units.size(count)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"
