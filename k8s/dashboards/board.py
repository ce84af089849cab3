"""A dashboard from its TOML file, which lists sections, rows and panels; this module makes Grafana's panels of them.

The keys of a panel:

    kind, title, unit (without it "none"), description
    query       an expression, which may be broken into lines; or queries: pairs of a legend and an expression
    column      of the table of runs: title, query, unit, and decimals or bar = true
    steps       of a number: pairs of a value and the colour from it on
    words       of a word: number -> the word and its colour
    colours     name of a series -> colour, or the name of a table of `COLOURS`
    limits      as steps, drawn as dashed lines
    band        two series between which the area is filled; dashed: series for comparison
    to_the_run  whether each series links to its run; filled = false: no area below lines
    min, max, decimals, logarithmic
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common
from grafana_foundation_sdk.models.common import ScaleDistribution
from grafana_foundation_sdk.models.dashboard import Dashboard

from k8s.dashboards import panels
from k8s.dashboards.frame import Frame, to_the_run
from k8s.dashboards.layout import Row, Section, place
from k8s.dashboards.run_table import run_table


def dashboard(file: Path, uid: str, *, all_runs: bool) -> Dashboard:
    """The complete dashboard of a file. all_runs: whether several runs can be selected together."""
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    frame = Frame(uid, content["title"], content["description"], all_runs)
    sections = [
        Section(
            section["title"],
            [Row(row["height"], [_panel(panel, frame.runs) for panel in row["panel"]]) for row in section["row"]],
        )
        for section in content["section"]
    ]
    return place(frame.built(), sections)


def _panel(given: Mapping[str, Any], runs: str) -> Any:
    what = panels.What(given["title"], given.get("unit", "none"), given["description"])
    match given["kind"]:
        case "runs":
            panel: Any = run_table(what, given["column"], runs)
        case "number":
            panel = panels.number(what, given["query"], dict(given.get("steps", ())))
        case "word":
            panel = panels.word(what, given["query"], given["words"])
        case "buckets":
            panel = panels.buckets(what, given["query"])
        case kind:
            make = {"lines": panels.lines, "stacked": panels.stacked}[kind]
            panel = make(what, *(panels.Query(text, legend) for legend, text in given["queries"]))
    return _styled(panel, given)


def _styled(panel: Any, given: Mapping[str, Any]) -> Any:
    """The panel with what a file sets beside its content. Overrides of series apply in this order."""
    for bound in ("min", "max", "decimals"):
        if bound in given:
            panel = getattr(panel, bound)(given[bound])
    if not given.get("filled", True):
        panel = panel.fill_opacity(0)
    if given.get("logarithmic"):
        panel = panel.scale_distribution(common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    if "band" in given:
        panel = panels.band(panel, *given["band"])
    colours = given.get("colours", {})
    panel = panels.coloured(panel, panels.COLOURS[colours] if isinstance(colours, str) else colours)
    panel = panels.dashed(panel, *given.get("dashed", ()))
    if "limits" in given:
        panel = panels.limit(panel, dict(given["limits"]))
    return to_the_run(panel) if given.get("to_the_run") else panel
