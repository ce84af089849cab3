"""What every test has: one torch thread, no deadlines, and a model small enough to read."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from torch import nn

from tests import postgres_server
from tests.postgres_server import PostgresServer

# Results are promised for a fixed number of threads, and test workers would fight for the cores.
torch.set_num_threads(1)

# A suite that a script started in the background has SIGINT ignored, and its processes would inherit that: a process
# under test must hear an interrupt as it does under an operator's hands.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure. All else stays as it is, also that CI draws the same examples every time.
settings.register_profile("impetus", settings(), deadline=None)
settings.load_profile("impetus")


@pytest.fixture
def tiny_model() -> nn.Module:
    """[n, 4] -> [n, 2], the same values every time; with float and integer buffers (BatchNorm)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for all tests of a worker. Skips where none is installed."""
    with postgres_server.running() as server:
        yield server
