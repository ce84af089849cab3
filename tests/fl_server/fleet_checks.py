"""Helpers for tests of the fleet: its clock, the eligible clients, a client's history, and an unavailable ledger."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from fl_server.clients import attendance as attendance_module
from fl_server.clients.draw_rules import Requirements
from fl_server.store import ledger as ledger_module
from fl_server.store.errors import StoreUnavailable
from fl_tasks import fingerprint, load_task
from tests.fl_server.harness import TASK, World

VERSION, SOURCE = fingerprint(load_task(TASK, {}))
OFFER = {"name": TASK, "version": VERSION, "source": SOURCE}


class Clock:
    """A monotonic clock that a test moves; wall time is real. A slow machine loses no client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(attendance_module, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))

    def end_grace(self, world: World) -> None:
        """Let the reattach grace pass: clients without a stream are lost."""
        self.now += world.config.limits.reattach_grace_s
        world.fleet.attendance.tick()


def eligible(
    world: World, run: str = "r", task: Mapping[str, str] = OFFER, labels: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The clients that a run may draw now."""
    eligibility = world.fleet.eligibility
    return eligibility.eligible(eligibility.selection(run, Requirements(task, labels or {})))


def history(world: World, client: str = "a") -> list[str]:
    """The names of the history events of a client."""
    return [entry.event for entry in world.store.history(client)]


def make_ledger_unavailable(patch: pytest.MonkeyPatch, world: World) -> None:
    """Make the ledger's writes of client records fail at once, without a wait for its recovery."""

    def fail(*_: object) -> None:
        raise StoreUnavailable("no answer")

    patch.setattr(world.store, "put_clients", fail)
    patch.setattr(ledger_module, "RETRY_S", 0.001)
