"""The faults of a dashboard, as messages: faults that Grafana does not report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

from fl_common.metrics import Declaration

COLUMNS = 24
Model = Mapping[str, Any]
_METRIC = re.compile(r"\b((?:fl|process|python)_\w+)\b(?:\{([^}]*)\})?")
_SELECTOR = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_OF_GRAFANA = {"__field", "__data", "__url_time_range"}
_SUFFIXES = ("_bucket", "_sum", "_count")


def faults(model: Model, known: Mapping[str, Declaration]) -> list[str]:
    """All faults of a dashboard. known: the declared metrics by name."""
    return [*_panels(model), *_grid(model), *_variables(model), *_metrics(model, known)]


def panels(model: Model) -> list[Model]:
    """The panels with queries."""
    return [panel for panel in model["panels"] if panel["type"] != "row"]


def expressions(model: Model) -> dict[str, str]:
    """Place -> expression, of panels, annotations and variables."""
    asked = {
        f"{panel['title']} {target['refId']}": target["expr"] for panel in panels(model) for target in panel["targets"]
    }
    asked |= {annotation["name"]: annotation["expr"] for annotation in model["annotations"]["list"]}
    for variable in model["templating"]["list"]:
        if variable["type"] == "query":
            asked[variable["name"]] = variable["query"].removeprefix("query_result(").removesuffix(")")
    return asked


def _panels(model: Model) -> Iterator[str]:
    ids = Counter(panel["id"] for panel in model["panels"])
    yield from (f"{count} panels have the id {id}" for id, count in ids.items() if count > 1)
    for panel in panels(model):
        title = panel.get("title") or f"the panel {panel['id']}"
        texts = {"title": panel.get("title"), "description": panel.get("description")}
        texts["unit"] = panel["fieldConfig"]["defaults"].get("unit")
        yield from (f"{title} has no {what}" for what, value in texts.items() if not value)
        refs = Counter(target["refId"] for target in panel["targets"])
        yield from (f"{title} has {count} queries {ref}" for ref, count in refs.items() if count > 1)
        if not panel["targets"]:
            yield f"{title} asks nothing"


def _grid(model: Model) -> Iterator[str]:
    cells = [(panel["title"], _cells(panel["gridPos"])) for panel in model["panels"]]
    for (one, first), (other, second) in combinations(cells, 2):
        if first & second:
            yield f"{one} and {other} overlap"
    covered = set().union(*(covered_by for _, covered_by in cells))
    whole = set(product(range(COLUMNS), range(max(y for _, y in covered) + 1)))
    if covered != whole:
        x, y = min((covered ^ whole), key=lambda cell: (cell[1], cell[0]))
        yield f"the grid has a hole, or an overlap, at column {x} of line {y}"


def _cells(grid: Mapping[str, int]) -> set[tuple[int, int]]:
    return set(product(range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])))


def _variables(model: Model) -> Iterator[str]:
    known = {variable["name"] for variable in model["templating"]["list"]} | _OF_GRAFANA
    texts = expressions(model) | {link["title"]: link["url"] for link in _links(model)}
    for where, text in texts.items():
        yield from (
            f"{where} asks for ${name}, which is no variable" for name in _VARIABLE.findall(text) if name not in known
        )


def _links(model: Model) -> Iterator[Model]:
    yield from model["links"]
    for panel in panels(model):
        yield from panel["fieldConfig"]["defaults"].get("links", [])
        for override in panel["fieldConfig"].get("overrides", []):
            for property_ in override["properties"]:
                yield from property_["value"] if property_["id"] == "links" else []


def linked(model: Model) -> set[str]:
    """The uids of its links."""
    return {match[1] for link in _links(model) if (match := re.match(r"/d/([^/]+)/", link["url"]))}


def _metrics(model: Model, known: Mapping[str, Declaration]) -> Iterator[str]:
    for where, text in expressions(model).items():
        for name, selectors in _METRIC.findall(text):
            declared = known.get(name) or _histogram(name, known)
            if declared is None:
                yield f"{where} asks for {name}, which is not exported"
                continue
            for label, how, value in _SELECTOR.findall(selectors):
                yield from (f"{where}: {name} has {why}" for why in _selector(declared, label, how, value))


def _histogram(name: str, known: Mapping[str, Declaration]) -> Declaration | None:
    base = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), "")
    declared = known.get(base)
    return declared if declared and declared.kind == "histogram" else None


def _selector(declared: Declaration, label: str, how: str, value: str) -> Iterator[str]:
    if label not in declared.labels:
        yield f"no label {label}"
    elif (values := declared.labels[label]) and not value.startswith("$"):
        asked = value.split("|") if how in ("=~", "!~") else [value]
        yield from (f"no {label} {label_value}" for label_value in asked if label_value not in values)
