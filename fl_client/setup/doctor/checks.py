"""All checks of `fl-client doctor` in their order, and their findings as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer

from fl_client.errors import ConfigError
from fl_client.settings.config import ClientConfig, load_config
from fl_client.setup.doctor import files, network, peers
from fl_client.setup.doctor.findings import Finding, Level, fail, ok
from fl_common.certificates.tls_version import set_oldest_tls

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


def run_checks(path: Path, *, silent: bool = False) -> Iterator[Finding]:
    """Findings as they are made, the quick checks first. Without valid settings there is only one.

    silent: also measure which silence a connection survives, which takes half a minute.
    """
    try:
        config = load_config(path)
    except ConfigError as error:
        yield fail("settings", str(error), "`fl-client init --force` writes a new file")
        return
    yield ok("settings", f"{path} is valid")
    yield network.check_clock(config)
    own = files.check_certificates(config)
    yield from own
    yield from files.check_policy(config)
    yield from peers.check_peers(config)
    yield from files.check_state_directory(config)
    yield from files.check_releases(config)
    yield from files.check_packages(config)
    if Level.FAIL not in [finding.level for finding in own]:
        yield from _connection(config, silent=silent)
    yield from _training(config)


def _connection(config: ClientConfig, *, silent: bool) -> Iterator[Finding]:
    """Name, port, TLS and the coordinator. Ends at the first failure."""
    set_oldest_tls("1.3" if config.tls is None else config.tls.min_version)
    from fl_client.setup.doctor import coordinator, idle

    if config.standbys:
        leading, found = network.find_leader(config)
        yield found
        config = config.model_copy(update={"server": leading})
    checks = (network.check_proxy, network.look_up, network.connect, network.check_tls, coordinator.check)
    for check in (*checks, idle.check) if silent else checks:
        findings = list(check(config))
        yield from findings
        if any(finding.level is Level.FAIL for finding in findings):
            return


def _training(config: ClientConfig) -> Iterator[Finding]:
    """The device, the task with its data, and space for the model. Only here torch is loaded."""
    from fl_client.setup.doctor import device

    yield from (findings := device.check(config))
    if any(finding.level is Level.FAIL for finding in findings):
        return
    trial = device.check_training_steps(config)
    yield from trial.findings
    yield from device.check_gates(config, trial.device)
    if trial.model_bytes is not None:
        yield device.on_disk(config.state_dir, trial.model_bytes)
        yield from device.in_memory(trial.device, trial.model_bytes)
