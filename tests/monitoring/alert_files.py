"""The deployed alert rules, and promtool's test cases for them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "k8s/components/monitoring/prometheus-rule.yaml"
CASES = Path(__file__).parent / "alerts"

Rule = dict[str, Any]


def groups() -> list[dict[str, Any]]:
    """The rule groups in Prometheus' own format."""
    return list(yaml.load(RULES.read_text(), yaml.CSafeLoader)["spec"]["groups"])


def rules() -> Iterator[Rule]:
    """Every rule, recording and alerting."""
    return (rule for group in groups() for rule in group["rules"])


def alerts() -> list[Rule]:
    """Every alerting rule; an alert with two severities has two."""
    return [rule for rule in rules() if "alert" in rule]


def names() -> list[str]:
    """Every alert's name, once."""
    return sorted({rule["alert"] for rule in alerts()})


def cases(alert: str) -> dict[str, Any]:
    """The test cases of an alert, in the format of promtool's test file."""
    return dict(yaml.load((CASES / f"{alert}.yaml").read_text(), yaml.CSafeLoader))


def expectations(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each expected (alert, time) of a test file."""
    return (case for test in content["tests"] for case in test.get("alert_rule_test", ()))


def promtool(folder: Path, what: str, content: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """`promtool check rules` or `promtool test rules` on a content."""
    (folder / f"{what}.json").write_text(json.dumps(content))
    command = ["promtool", what, "rules", f"{what}.json"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def run_cases(folder: Path, alert: str, expression: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the alert's cases with promtool on the alert and the recorded rules, or on another expression.

    The cases omit the link to the runbook, because another test checks all links.
    """
    content, rule_groups = cases(alert), groups()
    for group in rule_groups:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert", alert) == alert]
        for rule in (rule for rule in group["rules"] if "alert" in rule):
            rule["expr"] = expression or rule["expr"]
            del rule["annotations"]["runbook_url"]
    (folder / "rules.json").write_text(json.dumps({"groups": rule_groups}))
    return promtool(folder, "test", {"evaluation_interval": "1m", **content, "rule_files": ["rules.json"]})
