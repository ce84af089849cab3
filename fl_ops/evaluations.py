"""What each client found a round's model to be worth, as a table. Rendering only."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from fl_ops import units
from fl_ops.tables import table_of
from fl_server.client_metrics import EVALUATED, PREFIX
from fl_server.stop_rules import better
from protos.fl.v1 import admin_pb2

_FIRST = "accuracy"


def evaluations_table(answer: admin_pb2.ListEvaluationsResponse) -> RenderableType:
    """One client a line, the worst by the first metric first, and below what they come to."""
    names = _names(answer)
    if not names:
        return Text(f"no client has answered about round {answer.round.round}")
    table = table_of("Client", ">Examples", *(f">{units.plain(name)}" for name in names))
    for row in _worst_first(answer, names[0]):
        values = (f"{row.metrics[name]:.4f}" if name in row.metrics else units.NOTHING for name in names)
        table.add_row(Text(units.plain(row.client_id)), f"{row.num_examples:,}", *values)
    table.title = Text(f"round {answer.round.round}", style="bold")
    return Group(table, *(Text(units.plain(line)) for line in summary_lines(answer, names)))


def summary_lines(answer: admin_pb2.ListEvaluationsResponse, names: list[str]) -> list[str]:
    """Mean, deviation and worst decile of each metric, a line each; how many answered while it is not over."""
    metrics = answer.round.metrics
    if EVALUATED not in metrics:
        return [f"{len(answer.evaluations)} have answered, others are waited for"]
    lines = []
    for name in names:
        own = f"{PREFIX}{name}"
        if f"{own}_mean" in metrics:
            lines.append(
                f"{name}: mean {metrics[f'{own}_mean']:.4f}, deviation {metrics[f'{own}_std']:.4f}, worst decile "
                f"{metrics[f'{own}_worst_decile']:.4f}, over all examples {metrics[own]:.4f}"
            )
    return lines


def _names(answer: admin_pb2.ListEvaluationsResponse) -> list[str]:
    """Of all metrics that a client gave: accuracy first, then by name."""
    names = {name for row in answer.evaluations for name in row.metrics}
    return sorted(names, key=lambda name: (name != _FIRST, name))


def _worst_first(answer: admin_pb2.ListEvaluationsResponse, name: str) -> list[admin_pb2.ClientEvaluation]:
    """Who has no value of the metric comes last."""
    having = [row for row in answer.evaluations if name in row.metrics]
    up = better(name, 1.0, 0.0)
    ranked = sorted(having, key=lambda row: row.metrics[name] if up else -row.metrics[name])
    return [*ranked, *(row for row in answer.evaluations if name not in row.metrics)]
