"""The target of an attack, and functions that run an attack for a time.

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

from fl_ops.admin.settings import Certificates
from protos.wire import client_options
from tests.hostile.federation import Federation
from tests.processes.certificates import credentials
from tests.processes.process import TIMEOUT_S

Until = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses of the coordinator and the attacker's identity."""

    listen: str
    admin_listen: str
    metrics_listen: str
    health_listen: str
    name: str
    """Name in the attacker's certificate."""
    certificates: Certificates

    def channel(self) -> grpc.Channel:
        """A channel to the clients' port with the attacker's certificate; a context manager."""
        return grpc.secure_channel(self.listen, credentials(self.certificates), list(client_options()))


def target(federation: Federation, name: str = "mallory") -> Target:
    """The federation's coordinator, and a certificate for an attacker of that name."""
    settings = federation.server.settings
    keys = ("listen", "admin_listen", "metrics_listen", "health_listen")
    return Target(**{key: str(settings[key]) for key in keys}, name=name, certificates=federation.hostile(name))


def for_seconds(seconds: float) -> Until:
    """A function that returns True after this many seconds."""
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() >= ends


@contextmanager
def under(attack: Callable[[Target, Until], None], at: Target) -> Iterator[None]:
    """Run the attack in a thread during the block; its exception is raised after the block."""
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
        thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "the attack did not end"
    if failures:
        raise failures[0]
