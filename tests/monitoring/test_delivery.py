"""The complete path of an alert: a real coordinator dies, a real Prometheus fires, a real Alertmanager delivers."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.monitoring.alert_files import groups
from tests.monitoring.alertmanager import alertmanager
from tests.monitoring.programs import needed
from tests.monitoring.prometheus import Prometheus, Setup, prometheus
from tests.processes.federation import Coordinator
from tests.processes.process import Workspace, eventually


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator that has a run and no clients."""
    needed("prometheus")
    with Workspace(tmp_path) as workspace:
        server = Coordinator(workspace).serve()
        server.create("lonely")
        yield server


def impatient() -> list[Any]:
    """The deployed rules without the three minutes for which a coordinator may be down."""
    rules = copy.deepcopy(groups())
    for rule in (rule for group in rules for rule in group["rules"] if rule.get("alert") == "FlCoordinatorDown"):
        del rule["for"]
    return rules


def firing(seen: Prometheus) -> list[str]:
    """Names of the firing alerts."""
    return [alert["labels"]["alertname"] for alert in seen.alerts() if alert["state"] == "firing"]


@pytest.mark.slow
def test_a_run_without_clients_is_no_fault(server: Coordinator, tmp_path: Path) -> None:
    """Every deployed rule was evaluated on a real coordinator with a waiting run, and none fires."""
    with prometheus(tmp_path, Setup({"coordinator": [server.settings["metrics_listen"]]}, groups(), "500ms")) as seen:
        eventually(lambda: {rule["health"] for rule in seen.rules()} == {"ok"}, "every rule has been evaluated")
        assert seen.value('fl_run_state{run="lonely", state="waiting"}') == 1
        assert firing(seen) == []


@pytest.mark.slow
def test_an_alert_about_a_dead_coordinator_is_delivered_and_resolved(server: Coordinator, tmp_path: Path) -> None:
    """After SIGKILL the webhook gets the alert with its text and runbook; after the restart it gets the resolution.

    Nothing else is delivered, because one restart is no fault.
    """
    jobs = {"coordinator": [server.settings["metrics_listen"]]}
    with (
        alertmanager(tmp_path) as manager,
        prometheus(tmp_path, Setup(jobs, impatient(), "500ms", [manager.address])) as seen,
    ):
        eventually(lambda: not firing(seen), "it has been seen, and nothing is wrong")
        killed = time.time()
        server.kill()
        alert = manager.delivered("FlCoordinatorDown", since=killed)
        assert alert["labels"] == {"alertname": "FlCoordinatorDown", "severity": "critical"}
        assert alert["annotations"]["summary"] == "The coordinator is down"
        assert alert["annotations"]["runbook_url"].endswith("docs/operation/runbook.md#flcoordinatordown")
        server.serve()
        manager.delivered("FlCoordinatorDown", "resolved", since=killed)
        assert firing(seen) == []
        assert {sent["labels"]["alertname"] for body in manager.notifications for sent in body["alerts"]} == {
            "FlCoordinatorDown"
        }
