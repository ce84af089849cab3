"""`fl-client doctor`: everything that a daemon needs on this device and from its coordinator, looked at one by one.

Nothing is left behind and nobody is disturbed: no session is opened, no directory is made, no lock is taken. A daemon
may run meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fl_client.config import ClientConfig, load_config
from fl_client.errors import ConfigError
from fl_client.setup import certificates, clock, handshake, network, state_place
from fl_client.setup.findings import Finding, Level, fail, ok


def examine(path: Path) -> Iterator[Finding]:
    """Findings as they come: what is quick first, the device and its data last. Ends early without settings."""
    try:
        config = load_config(path)
    except ConfigError as error:
        yield fail("settings", str(error), "`fl-client init --force` writes the file anew")
        return
    yield ok("settings", f"{path} is what a daemon takes")
    yield clock.look(config)
    own = certificates.look(config)
    yield from own
    yield from state_place.look(config)
    if Level.FAIL not in [finding.level for finding in own]:
        yield from _way_to_the_coordinator(config)
    yield from _work(config)


def _way_to_the_coordinator(config: ClientConfig) -> Iterator[Finding]:
    """Name, port, TLS and the coordinator, as far as the way goes."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what grpc would print, is said here in words
    from fl_client.setup import asking

    for step in (network.look_up, network.connect, handshake.look, asking.look):
        found = list(step(config))
        yield from found
        if any(finding.level is Level.FAIL for finding in found):
            return


def _work(config: ClientConfig) -> Iterator[Finding]:
    """The device, the task with its data, and room for it: torch is loaded only here."""
    from fl_client.setup import conditions, device, room, trial

    yield from (found := device.look(config))
    if any(finding.level is Level.FAIL for finding in found):
        return
    tried = trial.look(config)
    yield from tried.findings
    yield from conditions.look(config, tried.device)
    if tried.model_bytes is not None:
        yield room.on_disk(config.state_dir, tried.model_bytes)
        yield from room.in_memory(tried.device, tried.model_bytes)
