"""Findings as text, each printed when it is found, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable

import typer

from fl_client.setup.doctor.findings import Finding, Level

HEALTHY, UNFIT = 0, 1
_COLOURS = {Level.OK: typer.colors.GREEN, Level.WARN: typer.colors.YELLOW, Level.FAIL: typer.colors.RED}
_CHECK = 12
"""Width of the column with the check's name."""


def report(findings: Iterable[Finding], as_json: bool) -> int:
    """Print the findings. Returns the exit code: 1 if a check failed."""
    seen: list[Finding] = []
    for finding in findings:
        seen.append(finding)
        if not as_json:
            _show(finding)
    counts = {level: sum(finding.level is level for finding in seen) for level in Level}
    healthy = counts[Level.FAIL] == 0
    if as_json:
        print(json.dumps({"healthy": healthy, "findings": [_as_json(finding) for finding in seen]}, indent=2))
    else:
        verdict = "a daemon can work here" if healthy else "a daemon cannot work here yet"
        print(f"{verdict}: {', '.join(f'{count} {level}' for level, count in counts.items())}")
    return HEALTHY if healthy else UNFIT


def _as_json(finding: Finding) -> dict[str, str]:
    return {"level": finding.level, "check": finding.check, "said": finding.message, "mend": finding.fix}


def _show(finding: Finding) -> None:
    level = typer.style(f"{finding.level:<4}", fg=_COLOURS[finding.level], bold=finding.level is Level.FAIL)
    typer.echo(f"{level} {finding.check:<{_CHECK}} {finding.message}")
    if finding.fix:
        typer.echo(f"     {'':<{_CHECK}} fix: {finding.fix}")
