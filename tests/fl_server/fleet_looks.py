"""The fleet as tests look at it: who may be drawn, what history says, and a ledger that is away."""

from __future__ import annotations

from fl_server import ledger as ledger_module
from fl_server.store.base import StoreAway
from tasks import fingerprint, load_task
from tests.fl_server.harness import TASK

VERSION, SOURCE = fingerprint(load_task(TASK, {}))
OFFER = {"name": TASK, "version": VERSION, "source": SOURCE}


def eligible(world, run="r", task=OFFER, labels=None):
    """Who may be drawn for a run."""
    return world.fleet.workforce.eligible(run, task, labels or {})


def history(world, client="a"):
    """The events about a client."""
    return [entry.event for entry in world.store.history(client)]


def without_a_ledger(patch, world):
    """The database is away, as far as clients are concerned."""

    def away(*_):
        raise StoreAway("nobody answers")

    patch.setattr(world.store, "put_clients", away)
    patch.setattr(ledger_module, "NO_ROOM_S", 0.001)
