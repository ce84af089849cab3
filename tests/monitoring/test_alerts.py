"""The rules that people are woken by: valid, each with its cases, its words and its section of the runbook."""

from __future__ import annotations

import re

import pytest

from tests.monitoring import alert_files
from tests.monitoring.alert_files import ROOT, alerts, cases, expectations, groups, judge, names, promtool
from tests.monitoring.programs import needed

RUNBOOK = "docs/runbook.md"


def test_promtool_accepts_the_rules(tmp_path):
    """The groups of the PrometheusRule, as an operator hands them to Prometheus; no rule is there twice."""
    needed("promtool")
    checked = promtool(tmp_path, "check", {"groups": groups()})
    assert checked.returncode == 0, checked.stderr
    assert f"SUCCESS: {len(list(alert_files.rules()))} rules found" in checked.stdout


@pytest.mark.parametrize("alert", names())
def test_an_alert_fires_when_it_should_and_not_otherwise(alert, tmp_path):
    """Series by hand, and what the alert says of them at which minute."""
    needed("promtool")
    judged = judge(tmp_path, alert)
    assert judged.returncode == 0, judged.stdout + judged.stderr


@pytest.mark.parametrize("alert", names())
def test_every_alert_has_cases_of_both_kinds(alert):
    """Times at which it fires, with each of its severities, and scenarios in which it never does."""
    content = cases(alert)
    found = list(expectations(content))
    assert {each["alertname"] for each in found} == {alert}
    told = {each["exp_labels"]["severity"] for expected in found for each in expected.get("exp_alerts", ())}
    assert told == {rule["labels"]["severity"] for rule in alerts() if rule["alert"] == alert}
    silent = [test for test in content["tests"] if not any(each.get("exp_alerts") for each in test["alert_rule_test"])]
    assert silent
    assert all(len(test["alert_rule_test"]) > 0 for test in content["tests"])


@pytest.mark.parametrize("alert", names())
def test_the_cases_notice_an_alert_that_always_fires_or_never_does(alert, tmp_path):
    """Rules in which the alert is replaced by one of the two are judged wrong: the cases can fail."""
    needed("promtool")
    assert judge(tmp_path, alert, "vector(1)").returncode == 1
    assert judge(tmp_path, alert, "vector(0) > 1").returncode == 1


def test_every_case_is_of_an_alert():
    """No file of cases is left over from an alert that is gone."""
    assert sorted(path.stem for path in alert_files.CASES.iterdir()) == names()


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_every_alert_says_what_and_where(rule):
    """Severity, a summary of one line, a description of sentences with a value or a name, and a link."""
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert len(annotations["summary"]) < 80
    assert annotations["description"].endswith(".")
    assert "{{" in annotations["description"]
    assert annotations["runbook_url"] == f"{RUNBOOK}#{rule['alert'].lower()}"


def test_the_runbook_has_a_section_for_each_alert_and_no_other():
    """Headings of the second level, from which the anchors are made, are the alerts' names."""
    headings = re.findall(r"^## (.+)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)
    assert sorted(headings) == names()


def test_rules_name_no_job():
    """Whoever scrapes calls his jobs as he likes."""
    assert not [rule for rule in alert_files.rules() if re.search(r"job\s*=", rule["expr"])]
