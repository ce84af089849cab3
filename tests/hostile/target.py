"""What an attack knows of the coordinator that it attacks, and how it is run for a while.

An attack is a module of `tests/hostile/attacks` with one function `attack(target, until)`: it does harm again and again
until `until()` is true, swallows the refusals that it gets, and leaves no thread or connection behind. Tests run one at
a time; `test_all_at_once.py` runs them all together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from fl_ops.settings import Certificates
from protos.wire import client_options
from tests.hostile.certificates import credentials
from tests.hostile.federation import Federation
from tests.integration.processes import PATIENCE_S

Until = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses, and the identity that the attacker has."""

    listen: str
    admin_listen: str
    metrics_listen: str
    health_listen: str
    name: str
    """In the attacker's certificate."""
    certificates: Certificates

    def channel(self) -> grpc.Channel:
        """To the clients' port, with the attacker's certificate; a context manager."""
        return grpc.secure_channel(self.listen, credentials(self.certificates), list(client_options()))


def target(federation: Federation, name: str = "mallory") -> Target:
    """The federation's coordinator, and a certificate for an attacker of that name."""
    settings = federation.server.settings
    addresses = (str(settings[key]) for key in ("listen", "admin_listen", "metrics_listen", "health_listen"))
    return Target(*addresses, name, federation.hostile(name))


def for_seconds(seconds: float) -> Until:
    """True from so many seconds on."""
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() >= ends


@contextmanager
def under(attack: Callable[[Target, Until], None], at: Target) -> Iterator[None]:
    """The attack goes on for as long as the block lasts, in a thread; what it raised is raised behind the block."""
    over, failures = threading.Event(), []

    def go_on() -> None:
        try:
            attack(at, over.is_set)
        except Exception as error:  # noqa: BLE001 - raised below, in the test
            failures.append(error)

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the attack did not end"
    if failures:
        raise failures[0]
