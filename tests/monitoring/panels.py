"""The dashboards' queries as Grafana sends them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "k8s/components/monitoring/dashboards"

FILLED = {
    "datasource": "prometheus",
    "window": "1m",
    "__rate_interval": "1m",
    "__range": "5m",
    "__range_s": "300",
    "__interval": "1s",
    "__interval_ms": "1000",
}
"""Values of Grafana's variables; the test sets `run`."""


@dataclass(frozen=True)
class Panel:
    """The queries of one panel, or of a dashboard's annotations."""

    dashboard: str
    title: str
    queries: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.title}"


def panels() -> list[Panel]:
    """Every panel with queries, of every dashboard in the folder."""
    return [panel for path in sorted(FOLDER.glob("*.json")) for panel in _of(path.stem, json.loads(path.read_text()))]


def annotation_queries() -> list[Panel]:
    """The annotation queries of every dashboard."""
    return [
        Panel(path.stem, f"annotation {mark['name']}", (mark["expr"],))
        for path in sorted(FOLDER.glob("*.json"))
        for mark in json.loads(path.read_text()).get("annotations", {}).get("list", ())
        if "expr" in mark
    ]


def filled(query: str, run: str) -> str:
    """The query with every variable replaced. Raises KeyError for an unknown variable."""
    known = {**FILLED, "run": run}
    return re.sub(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))", lambda match: known[match[1] or match[2]], query)


def _of(name: str, content: dict[str, Any]) -> Iterator[Panel]:
    for panel in content["panels"]:
        if panel["type"] == "row":
            yield from _of(name, {"panels": panel.get("panels", [])})
        queries = tuple(target["expr"] for target in panel.get("targets", ()))
        if queries:
            yield Panel(name, panel["title"], queries)
