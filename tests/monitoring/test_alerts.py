"""The alert rules: valid, each with its cases, its texts and its section of the runbook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow_except
from tests.monitoring import alert_files
from tests.monitoring.alert_files import ROOT, alerts, cases, expectations, groups, names, promtool, run_cases
from tests.monitoring.programs import needed

RUNBOOK = "docs/operation/runbook.md"


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    """Prometheus accepts the groups of the PrometheusRule, and no rule occurs twice."""
    needed("promtool")
    checked = promtool(tmp_path, "check", {"groups": groups()})
    assert checked.returncode == 0, checked.stderr
    assert f"SUCCESS: {len(list(alert_files.rules()))} rules found" in checked.stdout


@pytest.mark.parametrize("alert", names())
def test_an_alert_fires_in_its_cases_only(alert: str, tmp_path: Path) -> None:
    """For constructed series the alert has the expected state at the given minutes."""
    needed("promtool")
    judged = run_cases(tmp_path, alert)
    assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.parametrize("alert", names())
def test_every_alert_has_cases_of_both_kinds(alert: str) -> None:
    """It has times at which it fires with each severity, and scenarios in which it never fires."""
    content = cases(alert)
    found = list(expectations(content))
    assert {case["alertname"] for case in found} == {alert}
    severities = {alert_["exp_labels"]["severity"] for expected in found for alert_ in expected.get("exp_alerts", ())}
    assert severities == {rule["labels"]["severity"] for rule in alerts() if rule["alert"] == alert}
    silent = [test for test in content["tests"] if not any(case.get("exp_alerts") for case in test["alert_rule_test"])]
    assert silent
    assert all(len(test["alert_rule_test"]) > 0 for test in content["tests"])


@pytest.mark.parametrize("alert", slow_except(names(), "FlNoCommit", "FlCoordinatorDown"))
def test_the_cases_notice_an_alert_that_always_fires_or_never_does(alert: str, tmp_path: Path) -> None:
    """With either replacement for the alert the cases fail."""
    needed("promtool")
    assert run_cases(tmp_path, alert, "vector(1)").returncode == 1
    assert run_cases(tmp_path, alert, "vector(0) > 1").returncode == 1


def test_every_case_is_of_an_alert() -> None:
    """No file of cases belongs to a removed alert."""
    assert sorted(path.stem for path in alert_files.CASES.iterdir()) == names()


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_every_alert_has_its_texts(rule: dict[str, Any]) -> None:
    """It has a severity, a one-line summary, a description with a value or a name, and a link.

    It may have the process that it is about.
    """
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["labels"].keys() <= {"severity", "process"}
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert len(annotations["summary"]) < 80
    assert annotations["description"].endswith(".")
    assert "{{" in annotations["description"]
    assert annotations["runbook_url"] == f"{RUNBOOK}#{rule['alert'].lower()}"


def test_the_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    """The second-level headings, which become the anchors, are the alerts' names."""
    headings = re.findall(r"^## (.+)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)
    assert sorted(headings) == names()


def test_rules_name_no_job() -> None:
    """Operators choose the names of their scrape jobs."""
    assert not [rule for rule in alert_files.rules() if re.search(r"job\s*=", rule["expr"])]
