"""Registrations of these tests are written at once: each test connects its devices one after the other."""

from __future__ import annotations

import pytest

from fl_server.store import ledger


@pytest.fixture(autouse=True)
def write_registrations_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each registration and each attach waits for the gathering interval."""
    monkeypatch.setattr(ledger, "GATHER_S", 0.0)
