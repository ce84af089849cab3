"""The fleet's clock; and registrations are written at once, as each test connects its devices one after the other."""

from __future__ import annotations

import pytest

from fl_server.store import ledger
from tests.fl_server.fleet_checks import Clock


@pytest.fixture(autouse=True)
def write_registrations_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each registration and each attach waits for the gathering interval."""
    monkeypatch.setattr(ledger, "GATHER_S", 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The fleet's clock, which stands still until the test moves it."""
    return Clock(monkeypatch)
