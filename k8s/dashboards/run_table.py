"""The table of runs: one row for each, with the values that an operator compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grafana_foundation_sdk.builders import common, table
from grafana_foundation_sdk.models.dashboard import DataTransformerConfig

from k8s.dashboards.frame import RUN_URL
from k8s.dashboards.panels import REFS, RUN_STATES, Query, What, mappings, overridden, rows

Column = Mapping[str, Any]
"""A column with a number for each run: its title, query by run, unit, and `decimals` or `bar`."""
_BAR = {"custom.cellOptions": {"type": "gauge", "mode": "basic"}, "min": 0, "max": 1, "decimals": 0}


def run_table(what: What, columns: Sequence[Column], runs: str) -> table.Panel:
    """The table of the runs that a selector matches."""
    labels = (
        f"max by (run, algorithm, task) (fl_run_info{{{runs}}})",
        f"max by (run, state) (fl_run_state{{{runs}}}) == 1",
    )
    panel = rows(what, *map(Query, labels), *(Query(column["query"]) for column in columns))
    panel = panel.sort_by([common.TableSortByFieldState().display_name("May be drawn").desc(True)])
    panel = panel.transformations([DataTransformerConfig("merge", options={}), _in_order(columns)])
    link = {"title": "Run detail", "url": RUN_URL + "${__data.fields.Run}"}
    panel = overridden(panel, "Run", {"links": [link], "custom.width": 150})
    panel = overridden(panel, "Task", {"custom.width": 210})
    words = mappings({state: (state, colour) for state, colour in RUN_STATES.items()})
    panel = overridden(panel, "State", {"custom.cellOptions": {"type": "color-text"}, "mappings": words})
    for column in columns:
        more = _BAR if column.get("bar") else {name: column[name] for name in ("decimals",) if name in column}
        panel = overridden(panel, column["title"], {"unit": column.get("unit", "none"), **more})
    return panel


def _in_order(columns: Sequence[Column]) -> DataTransformerConfig:
    """Show the labels of the first two queries; their values are always 1."""
    values = {f"Value #{ref}": column["title"] for ref, column in zip(REFS[2:], columns, strict=False)}
    names = {"run": "Run", "state": "State", "algorithm": "Algorithm", "task": "Task", **values}
    options = {
        "excludeByName": {"Time": True, "Value #A": True, "Value #B": True},
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": names,
    }
    return DataTransformerConfig("organize", options=options)
