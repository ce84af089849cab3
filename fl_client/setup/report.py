"""Findings as lines for people, one at a time as they come, or as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

import typer

from fl_client.setup.findings import Finding, Level

HEALTHY, UNFIT = 0, 1
_COLOURS = {Level.OK: typer.colors.GREEN, Level.WARN: typer.colors.YELLOW, Level.FAIL: typer.colors.RED}
_CHECK = 12
"""Width of the column that says what was looked at."""


def report(findings: Iterable[Finding], as_json: bool) -> int:
    """Show them; the exit code: 1 if one of them is a fault."""
    seen = []
    for finding in findings:
        seen.append(finding)
        if not as_json:
            _show(finding)
    counts = {level: sum(finding.level is level for finding in seen) for level in Level}
    healthy = counts[Level.FAIL] == 0
    if as_json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in seen]}, indent=2))
    else:
        verdict = "a daemon can work here" if healthy else "a daemon cannot work here yet"
        print(f"{verdict}: {', '.join(f'{count} {level}' for level, count in counts.items())}")
    return HEALTHY if healthy else UNFIT


def _show(finding: Finding) -> None:
    level = typer.style(f"{finding.level:<4}", fg=_COLOURS[finding.level], bold=finding.level is Level.FAIL)
    typer.echo(f"{level} {finding.check:<{_CHECK}} {finding.said}")
    if finding.mend:
        typer.echo(f"     {'':<{_CHECK}} mend: {finding.mend}")
