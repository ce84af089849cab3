"""The clients' evaluations of a round's model, as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from fl_common import units
from fl_ops.render.fitted import FittedTable
from fl_server.rounds.client_metrics import EVALUATED
from fl_server.rounds.directions import PREFIX
from protos.fl.v1 import admin_pb2

_FIRST = "accuracy"


def evaluations_table(response: admin_pb2.ListEvaluationsResponse) -> RenderableType:
    """A row for each client, the worst by the first metric first; below, the summary of each metric."""
    names = _metric_names(response)
    if not names:
        return Text(f"no client has evaluated round {response.round.round}")
    shown = [units.plain(name) for name in names]
    table = FittedTable(
        ("Client", ">Examples", *(f">{name}" for name in shown)), optional=("Examples", *reversed(shown[1:]))
    )
    for row in _ordered(response, names[0]):
        values = (f"{row.metrics[name]:.4f}" if name in row.metrics else units.NOTHING for name in names)
        table.add_row(Text(units.plain(row.client_id)), f"{row.num_examples:,}", *values)
    title = Text(f"round {response.round.round}", style="bold")
    return Group(title, table, *(Text(units.plain(line)) for line in summary_lines(response, names)))


def summary_lines(response: admin_pb2.ListEvaluationsResponse, names: list[str]) -> list[str]:
    """A line with mean, deviation and worst decile for each metric; before the end, the number of evaluations."""
    metrics = response.round.metrics
    if EVALUATED not in metrics:
        return [f"{len(response.evaluations)} clients have evaluated it, others are still expected"]
    lines = []
    for name in names:
        own = f"{PREFIX}{name}"
        if f"{own}_mean" in metrics:
            worst = metrics.get(f"{own}_worst_decile")
            lines.append(
                f"{name}: mean {metrics[f'{own}_mean']:.4f}, deviation {metrics[f'{own}_std']:.4f}, "
                + ("" if worst is None else f"worst decile {worst:.4f}, ")
                + f"over all examples {metrics[own]:.4f}"
            )
    return lines


def _metric_names(response: admin_pb2.ListEvaluationsResponse) -> list[str]:
    """Names of all metrics of the clients: accuracy first, then by name."""
    names = {name for row in response.evaluations for name in row.metrics}
    return sorted(names, key=lambda name: (name != _FIRST, name))


def _ordered(response: admin_pb2.ListEvaluationsResponse, name: str) -> list[admin_pb2.ClientEvaluation]:
    """Clients by the metric, the worst first, or the lowest first if the direction is unknown.

    Those without a value come last.
    """
    having = [row for row in response.evaluations if name in row.metrics]
    ranked = sorted(having, key=lambda row: row.metrics[name], reverse=response.lower_is_better.get(name, False))
    return [*ranked, *(row for row in response.evaluations if name not in row.metrics)]
