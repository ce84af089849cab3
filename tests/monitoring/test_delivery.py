"""An alert on its whole way: a real coordinator dies, a real Prometheus notices, a real Alertmanager tells people."""

from __future__ import annotations

import copy
import time

import pytest

from tests.integration.harness import Coordinator
from tests.integration.processes import Place
from tests.monitoring.alert_files import groups
from tests.monitoring.alertmanager import alertmanager
from tests.monitoring.programs import eventually, needed
from tests.monitoring.prometheus import Setup, prometheus


@pytest.fixture
def server(tmp_path):
    """A coordinator that has a run and no clients."""
    needed("prometheus")
    with Place(tmp_path) as place:
        server = Coordinator(place).serve()
        server.create("lonely")
        yield server


def impatient():
    """The deployed rules, but for the three minutes that a coordinator may be away."""
    rules = copy.deepcopy(groups())
    for rule in (rule for group in rules for rule in group["rules"] if rule.get("alert") == "FlCoordinatorDown"):
        del rule["for"]
    return rules


def firing(seen):
    """Names of the alerts that are told now."""
    return [alert["labels"]["alertname"] for alert in seen.alerts() if alert["state"] == "firing"]


def test_a_run_without_clients_is_no_fault(server, tmp_path):
    """Every deployed rule has been evaluated on a real coordinator whose run waits, and none fires."""
    with prometheus(tmp_path, Setup({"coordinator": [server.settings["metrics_listen"]]}, groups(), "500ms")) as seen:
        eventually(lambda: {rule["health"] for rule in seen.rules()} == {"ok"}, "every rule has been evaluated")
        assert seen.value('fl_run_state{run="lonely", state="waiting"}') == 1
        assert firing(seen) == []


@pytest.mark.slow
def test_a_dead_coordinator_is_told_to_people_and_so_is_its_return(server, tmp_path):
    """SIGKILL, and the webhook gets the alert with its words and the runbook; it comes back, and that is told too.

    Nothing else is told, for one restart is no fault either.
    """
    jobs = {"coordinator": [server.settings["metrics_listen"]]}
    with (
        alertmanager(tmp_path) as manager,
        prometheus(tmp_path, Setup(jobs, impatient(), "500ms", [manager.address])) as seen,
    ):
        eventually(lambda: not firing(seen), "it has been seen, and nothing is wrong")
        killed = time.time()
        server.kill()
        told = manager.delivered("FlCoordinatorDown", since=killed)
        assert told["labels"] == {"alertname": "FlCoordinatorDown", "severity": "critical"}
        assert told["annotations"]["summary"] == "The coordinator is down"
        assert told["annotations"]["runbook_url"].endswith("docs/runbook.md#flcoordinatordown")
        server.serve()
        manager.delivered("FlCoordinatorDown", "resolved", since=killed)
        assert firing(seen) == []
        assert {each["labels"]["alertname"] for body in manager.notifications for each in body["alerts"]} == {
            "FlCoordinatorDown"
        }
