"""docs/operation/metrics.md is the output of its script, and the registries keep Prometheus' conventions."""

from __future__ import annotations

import re

import pytest

from docs.source import metrics
from docs.source.keys import ROOT
from fl_client.monitoring.metrics import Metrics as ClientMetrics
from fl_server.metrics import Metrics as ServerMetrics

BASE_UNITS = {"seconds", "bytes", "rounds"}
NOT_BASE = {"milliseconds", "ms", "minutes", "hours", "kilobytes", "megabytes", "mib", "percent", "ratio100"}
KINDS: dict[str, ServerMetrics | ClientMetrics] = {
    "server": metrics.server_metrics(),
    "worker": metrics.worker_metrics(),
    "client": ClientMetrics(),
}
each_registry = pytest.mark.parametrize("kind", KINDS)


def test_the_page_is_up_to_date() -> None:
    """Run `python -m docs.source.metrics` after a change of a metric, and add there when to act."""
    assert metrics.PAGE.read_text(encoding="utf-8") == metrics.page()


def test_the_alerts_of_the_page_are_in_the_runbook() -> None:
    """Every link leads to a heading."""
    runbook = (ROOT / "docs/operation/runbook.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## (\w+)$", runbook, re.MULTILINE))
    named = set(re.findall(r"\[(Fl\w+)\]", metrics.page()))
    assert named
    assert named <= headings


@each_registry
def test_a_registry_has_what_is_declared_and_nothing_else(kind: str) -> None:
    """By name and type, also what its collectors find when nothing is there yet."""
    factory = KINDS[kind].factory
    families = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in factory.registry.collect()
    }
    assert families == {metric.name: metric.kind for metric in factory.declared}


@each_registry
def test_samples_have_the_labels_that_are_declared(kind: str) -> None:
    """And the values; a histogram's bounds apart."""
    declared = {metric.name: metric.labels for metric in KINDS[kind].factory.declared}
    for family in KINDS[kind].registry.collect():
        labels = declared[f"{family.name}_total" if family.type == "counter" else family.name]
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(labels)
            assert all(value in labels[name] for name, value in sample.labels.items() if labels.get(name))


@each_registry
def test_names_follow_the_conventions(kind: str) -> None:
    """A prefix of ours, words in lower case, `_total` behind counters and nothing else, base units."""
    for metric in KINDS[kind].factory.declared:
        assert re.fullmatch(r"(fl|process|python_gc)(_[a-z]+)+", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not NOT_BASE & set(metric.name.split("_")), metric.name
        assert metric.kind != "histogram" or metric.name.rpartition("_")[2] in BASE_UNITS, metric.name
        assert metric.meaning.endswith("."), metric.name


@each_registry
def test_no_label_can_be_a_client(kind: str) -> None:
    """No label is an address or a round either: values that grow with the fleet or time make unlimited series."""
    labels = {name for metric in KINDS[kind].factory.declared for name in metric.labels}
    assert not labels & {"client", "client_id", "address", "peer", "round", "session", "digest"}
