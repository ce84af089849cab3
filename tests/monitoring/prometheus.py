"""A real Prometheus for a test, with the given targets and rules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.monitoring.programs import api, listening, needed
from tests.processes.process import eventually

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Sample:
    """One element of an instant vector; a scalar is one without labels."""

    labels: Labels
    value: float


@dataclass(frozen=True)
class Series:
    """One element of a range vector: values at unix times."""

    labels: Labels
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Setup:
    """The settings of a Prometheus.

    jobs: job -> addresses ("127.0.0.1:7072") to scrape. rules: groups as in a PrometheusRule's spec.
    interval: between two scrapes, and between two evaluations of a rule. alertmanagers: addresses.
    lookback: how long a sample counts as the latest one. More of prometheus.yml's own keys go into `more`.
    """

    jobs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rules: Sequence[Mapping[str, Any]] = ()
    interval: str = "500ms"
    alertmanagers: Sequence[str] = ()
    lookback: str = "5m"
    more: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The content of prometheus.yml, which names rules.yml in the same folder."""
        alerting = {"alertmanagers": [{"static_configs": [{"targets": [*self.alertmanagers]}]}]}
        return {
            "global": {
                "scrape_interval": self.interval,
                "scrape_timeout": self.interval,
                "evaluation_interval": self.interval,
            },
            "rule_files": ["rules.yml"],
            "alerting": alerting if self.alertmanagers else {},
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [*targets]}]} for job, targets in self.jobs.items()
            ],
            **self.more,
        }


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.url = f"http://{address}"

    def query(self, expression: str, at: float | None = None) -> list[Sample]:
        """The instant vector of an expression, now or at a unix time. Raises AssertionError for an invalid one."""
        found = api(self.address, "query", {"query": expression, **({} if at is None else {"time": f"{at:.3f}"})})
        if found["resultType"] == "scalar":
            return [Sample({}, float(found["result"][1]))]
        assert found["resultType"] == "vector", f"{expression}: expected a vector, got a {found['resultType']}"
        return [Sample(sample["metric"], float(sample["value"][1])) for sample in found["result"]]

    def value(self, expression: str, at: float | None = None) -> float | None:
        """The value of an expression with at most one element; None for an empty answer."""
        found = self.query(expression, at)
        assert len(found) < 2, f"{expression}: expected one element, got {found}"
        return found[0].value if found else None

    def query_range(self, expression: str, start: float, end: float, step_s: float = 1.0) -> list[Series]:
        """The values of an expression from one unix time to another, `step_s` apart."""
        asked = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_s:g}"}
        found = api(self.address, "query_range", asked)["result"]
        return [
            Series(series["metric"], tuple((at, float(value)) for at, value in series["values"])) for series in found
        ]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its state and health, from the API."""
        return [rule for group in api(self.address, "rules")["groups"] for rule in group["rules"]]

    def alerts(self) -> list[dict[str, Any]]:
        """The pending and firing alerts."""
        return list(api(self.address, "alerts")["alerts"])

    def targets(self) -> dict[str, str]:
        """Health of each target, by its address: up, down, unknown."""
        active = api(self.address, "targets", {"state": "active"})["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in active}

    def all_up(self, *targets: str) -> None:
        """Wait until each of these addresses was scraped without error and its sample can be queried."""
        for target in targets:
            self._up(target)

    def _up(self, target: str) -> None:
        eventually(lambda: self.value(f'up{{instance="{target}"}}') == 1, f"{target} is up")


@contextmanager
def prometheus(folder: Path, setup: Setup) -> Iterator[Prometheus]:
    """A Prometheus with its data in a folder of the test, ready and with every target up; it ends with the block.

    Skips the test if none is installed.
    """
    needed("prometheus")
    # JSON is valid YAML.
    (folder / "rules.yml").write_text(json.dumps({"groups": [*setup.rules]}))
    (folder / "prometheus.yml").write_text(json.dumps(setup.config()))
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "tsdb",
        "storage.tsdb.retention.time": "1d",
        "query.lookback-delta": setup.lookback,
        # Prometheus finds an Alertmanager after some seconds. Earlier alerts are lost.
        "rules.alert.resend-delay": "1s",
        "web.listen-address": "127.0.0.1:0",
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with listening(command, folder / "prometheus.log") as address:
        running = Prometheus(address)
        running.all_up(*(target for targets in setup.jobs.values() for target in targets))
        yield running
