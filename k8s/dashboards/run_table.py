"""The table of runs: one row for each, with the values that an operator compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common, table
from grafana_foundation_sdk.models.dashboard import DataTransformerConfig, DynamicConfigValue

from k8s.dashboards.expressions import RUN_STATES, evaluation, share, since_commit
from k8s.dashboards.frame import RUN_URL
from k8s.dashboards.panels import Query, What, mappings, rows


@dataclass(frozen=True)
class _Column:
    """A column with a number for each run: heading, expression by run, unit, and more properties of the field."""

    title: str
    expr: str
    unit: str = "none"
    more: tuple[tuple[str, Any], ...] = ()


_BAR = (("custom.cellOptions", {"type": "gauge", "mode": "basic"}), ("min", 0), ("max", 1), ("decimals", 0))


def run_table(runs: str) -> table.Panel:
    """Return the table of the runs that a selector matches."""
    columns = _columns(runs)
    queries = [
        f"max by (run, algorithm, task) (fl_run_info{{{runs}}})",
        f"max by (run, state) (fl_run_state{{{runs}}}) == 1",
        *(column.expr for column in columns),
    ]
    what = What("Runs", "none", "All runs with metrics: the active ones and the last 20 that ended.")
    panel = rows(what, *map(Query, queries)).sort_by(
        [common.TableSortByFieldState().display_name("May be drawn").desc(True)]
    )
    panel = panel.transformations([DataTransformerConfig("merge", options={}), _in_order(columns)])
    return _with_looks(panel, columns)


def _columns(runs: str) -> list[_Column]:
    done, planned = (f"max by (run) ({name}{{{runs}}})" for name in ("fl_round", "fl_rounds_planned"))
    best = f'max by (run) (fl_evaluation_best{{{runs},metric="accuracy"}})'
    return [
        _Column("Rounds", done),
        _Column("Done", f"{done} / {planned}", "percentunit", _BAR),
        _Column("Accuracy", evaluation(runs, "accuracy"), "percentunit", (("decimals", 1),)),
        _Column("Best", best, "percentunit", (("decimals", 1),)),
        _Column("Loss", evaluation(runs, "loss"), "none", (("decimals", 3),)),
        _Column("Since a commit", since_commit(runs), "s"),
        _Column("May be drawn", f"max by (run) (fl_clients_eligible{{{runs}}})"),
        _Column("Drop-outs", share(runs, "lost|failed", " by (run)"), "percentunit", (("decimals", 1),)),
    ]


def _in_order(columns: list[_Column]) -> DataTransformerConfig:
    """Show the labels of the first two queries; their values are always 1."""
    letters = "ABCDEFGHIJKLMNOP"
    values = {f"Value #{letter}": column.title for letter, column in zip(letters[2:], columns, strict=False)}
    names = {"run": "Run", "state": "State", "algorithm": "Algorithm", "task": "Task", **values}
    options = {
        "excludeByName": {"Time": True, "Value #A": True, "Value #B": True},
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": names,
    }
    return DataTransformerConfig("organize", options=options)


def _with_looks(panel: table.Panel, columns: list[_Column]) -> table.Panel:
    link = {"title": "Run detail", "url": RUN_URL + "${__data.fields.Run}"}
    panel = panel.override_by_name(
        "Run", [DynamicConfigValue("links", [link]), DynamicConfigValue("custom.width", 150)]
    )
    panel = panel.override_by_name("Task", [DynamicConfigValue("custom.width", 210)])
    words = mappings({state: (state, colour) for state, colour in RUN_STATES.items()})
    looks = [DynamicConfigValue("custom.cellOptions", {"type": "color-text"}), DynamicConfigValue("mappings", words)]
    panel = panel.override_by_name("State", looks)
    for column in columns:
        properties = [DynamicConfigValue("unit", column.unit), *(DynamicConfigValue(*more) for more in column.more)]
        panel = panel.override_by_name(column.title, properties)
    return panel
