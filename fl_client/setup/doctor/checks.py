"""All checks of `fl-client doctor`, in their order. See the package for what a check must not do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fl_client.errors import ConfigError
from fl_client.settings.config import ClientConfig, load_config
from fl_client.setup.doctor import certificates, clock, handshake, network, policy, state_directory
from fl_client.setup.doctor.findings import Finding, Level, fail, ok
from fl_common.certificates.tls_version import set_oldest_tls


def run_checks(path: Path) -> Iterator[Finding]:
    """Findings as they are made, the quick checks first. Without valid settings there is only one."""
    try:
        config = load_config(path)
    except ConfigError as error:
        yield fail("settings", str(error), "`fl-client init --force` writes a new file")
        return
    yield ok("settings", f"{path} is valid")
    yield clock.check(config)
    own = certificates.check(config)
    yield from own
    yield from policy.check(config)
    yield from state_directory.check(config)
    if Level.FAIL not in [finding.level for finding in own]:
        yield from _connection(config)
    yield from _training(config)


def _connection(config: ClientConfig) -> Iterator[Finding]:
    """Name, port, TLS and the coordinator. Ends at the first failure."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the findings replace grpc's own messages
    set_oldest_tls("1.3" if config.tls is None else config.tls.min_version)
    from fl_client.setup.doctor import coordinator

    for check in (network.look_up, network.connect, handshake.check, coordinator.check):
        found = list(check(config))
        yield from found
        if any(finding.level is Level.FAIL for finding in found):
            return


def _training(config: ClientConfig) -> Iterator[Finding]:
    """The device, the task with its data, and space for the model. Only here torch is loaded."""
    from fl_client.setup.doctor import device, disk_space, gates, training_step

    yield from (found := device.check(config))
    if any(finding.level is Level.FAIL for finding in found):
        return
    trial = training_step.check(config)
    yield from trial.findings
    yield from gates.check(config, trial.device)
    if trial.model_bytes is not None:
        yield disk_space.on_disk(config.state_dir, trial.model_bytes)
        yield from disk_space.in_memory(trial.device, trial.model_bytes)
