"""The committed dashboards are those that the Python generates, and they have no visible fault."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fl_client.monitoring.metrics
from docs.source.metrics import server_metrics, worker_metrics
from fl_common.metrics import Declaration
from k8s.dashboards.files import committed, texts
from k8s.dashboards.frame import OVERVIEW, RUN_DETAIL, WINDOWS
from k8s.dashboards.layout import Row
from k8s.dashboards.panels import What, number
from tests.k8s.dashboard_checks import expressions, faults, linked, panels
from tests.monitoring.programs import needed

MODELS = committed()


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Declaration]:
    """Every metric of a coordinator, a worker or a daemon."""
    loop = asyncio.new_event_loop()
    server = server_metrics()
    server.watch(loop, tmp_path_factory.mktemp("state"))
    loop.close()
    client = fl_client.monitoring.metrics.Metrics()
    factories = (server.factory, worker_metrics().factory, client.factory)
    return {metric.name: metric for factory in factories for metric in factory.declared}


@pytest.mark.parametrize("path", texts(), ids=lambda path: path.name)
def test_the_committed_dashboards_are_up_to_date(path: Path) -> None:
    """Run `python -m k8s.dashboards` after a change and check the difference."""
    assert path.read_text(encoding="utf-8") == texts()[path]


def test_no_dashboard_is_left_over() -> None:
    """Every JSON file in the folder is generated and has its own uid."""
    folder = next(iter(texts())).parent
    assert set(folder.glob("*.json")) == set(texts())
    assert sorted(MODELS) == sorted([OVERVIEW, RUN_DETAIL])


@pytest.mark.parametrize("uid", MODELS)
def test_nothing_is_wrong_with_a_dashboard(uid: str, known: Any) -> None:
    """Ids, titles, units, descriptions, grid, variables, and each metric with its labels and their values."""
    assert faults(MODELS[uid], known) == []


@pytest.mark.parametrize(("uid", "other"), [(OVERVIEW, RUN_DETAIL), (RUN_DETAIL, OVERVIEW)])
def test_the_dashboards_link_to_each_other(uid: str, other: str) -> None:
    """The overview by a click on a run too; with the Prometheus, the window and the time that were chosen."""
    assert linked(MODELS[uid]) == {other}


def test_a_run_leads_to_its_details() -> None:
    """From its row of the table by the cell's value, from its line by the series' label."""
    by_type = {
        kind: [panel for panel in panels(MODELS[OVERVIEW]) if panel["type"] == kind] for kind in ("table", "timeseries")
    }
    of_table, of_lines = (json.dumps(found) for found in by_type.values())
    assert "var-run=${__data.fields.Run}" in of_table
    assert of_lines.count("var-run=${__field.labels.run}") == 4


@pytest.mark.parametrize("uid", MODELS)
def test_a_run_is_chosen_by_name_and_queried_by_id(uid: str) -> None:
    """Grafana looks for both groups in every series of the variable's query, as it writes them."""
    (variable,) = [listed for listed in MODELS[uid]["templating"]["list"] if listed["name"] == "run"]
    pattern, flags = variable["regex"].removeprefix("/").rsplit("/", 1)
    series = 'fl_run_info{algorithm="fedcm",run="cm-2",task="digits",words="cm-2 · fedcm · digits"} 1 1763726400000'
    found = [match.groupdict() for match in re.finditer(pattern.replace("(?<", "(?P<"), series)]
    assert flags == "g"
    assert found == [{"text": None, "value": "cm-2"}, {"text": "cm-2 · fedcm · digits", "value": None}]


@pytest.mark.parametrize("uid", MODELS)
def test_commits_abandoned_rounds_and_starts_are_marked(uid: str) -> None:
    """Commits and starts at the time that is the series' value, which Grafana takes in milliseconds."""
    marks = {annotation["name"]: annotation for annotation in MODELS[uid]["annotations"]["list"]}
    assert list(marks) == ["Commits", "Abandoned rounds", "Coordinator starts"]
    assert [mark["useValueForTime"] for mark in marks.values()] == [True, False, True]
    assert all(("1000 * " in mark["expr"]) == mark["useValueForTime"] for mark in marks.values())


def test_a_row_that_would_leave_a_hole_is_refused() -> None:
    """24 columns are not shared evenly by five panels."""
    with pytest.raises(ValueError, match="share 24 columns evenly, got 5 in a row"):
        _ = Row(4, [number(What("a", "none", "b"), "c")] * 5).width


def filled(expression: str, window: str) -> str:
    """With a value for each variable."""
    return expression.replace("$window", window).replace("$run", "digits-fedcm")


def promtool(tmp_path: Path, asked: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Each expression as a recording rule, read by Prometheus' own parser."""
    rules = [{"record": f"asked:{number}", "expr": text} for number, text in enumerate(asked.values())]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("window", [WINDOWS[0], WINDOWS[-1]])
@pytest.mark.parametrize("uid", MODELS)
def test_prometheus_reads_every_expression(uid: str, window: str, tmp_path: Path) -> None:
    """Of panels, annotations and variables, with each variable's value in its place."""
    needed("promtool")
    asked = {where: filled(text, window) for where, text in expressions(MODELS[uid]).items()}
    found = promtool(tmp_path, asked)
    assert (found.returncode, found.stderr) == (0, "")
    assert f"{len(asked)} rules found" in found.stdout


def test_prometheus_refuses_what_is_no_expression(tmp_path: Path) -> None:
    """The check above finds an invalid expression."""
    needed("promtool")
    assert promtool(tmp_path, {"bad": "sum by run (fl_round)"}).returncode != 0


def stat(model: Any) -> Any:
    """The first panel with data."""
    return next(panel for panel in model["panels"] if panel["type"] != "row")


def ask(expression: str) -> Callable[[Any], None]:
    """Set the query of a dashboard's first panel."""

    def spoil(model: Any) -> None:
        stat(model)["targets"][0]["expr"] = expression

    return spoil


BAD: dict[str, Callable[[Any], object]] = {
    "State has no title": lambda model: stat(model).update(title=""),
    "State has no description": lambda model: stat(model).update(description=""),
    "State has no unit": lambda model: stat(model)["fieldConfig"]["defaults"].pop("unit"),
    "2 panels have the id 101": lambda model: model["panels"][2].update(id=101),
    "State has 2 queries A": lambda model: stat(model)["targets"].append(stat(model)["targets"][0]),
    "State asks nothing": lambda model: stat(model)["targets"].clear(),
    "State and Rounds committed overlap": lambda model: stat(model)["gridPos"].update(w=4),
    "a hole, or an overlap, at column 0 of line 1": lambda model: model["panels"].remove(stat(model)),
    "a hole, or an overlap, at column 24": lambda model: model["panels"][-1]["gridPos"].update(w=9),
    "which is no variable": ask('fl_round{run="$runs"}'),
    "fl_rounds_lost_total, which is not exported": ask("fl_rounds_lost_total"),
    "fl_round_bucket, which is not exported": ask("fl_round_bucket"),
    "fl_round has no label client": ask('fl_round{client="a"}'),
    "fl_assignments_total has no state gone": ask('fl_assignments_total{state=~"lost|gone"}'),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_dashboard_is_found(fault: str, known: Any) -> None:
    """Every check finds its fault."""
    model = copy.deepcopy(MODELS[RUN_DETAIL])
    BAD[fault](model)
    if "no title" in fault:
        fault = "has no title"
    assert any(fault in found for found in faults(model, known)), faults(model, known)
