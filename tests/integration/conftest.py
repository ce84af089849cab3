"""Fixtures with real processes for the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes.federation import Fleet
from tests.processes.process import Workspace


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fleet for all tests of a worker, because the start of processes takes time."""
    with Workspace(tmp_path_factory.mktemp("shared")) as workspace:
        yield Fleet(workspace, 3)


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    """A coordinator and three idle daemons. A round draws two of them."""
    with shared_fleet.lent() as fleet:
        yield fleet


@pytest.fixture(scope="session")
def undisturbed(shared_fleet: Fleet) -> list[str]:
    """Digests of the rounds of an undisturbed default run."""
    shared_fleet.reset()
    return shared_fleet.server.digests(shared_fleet.server.create("undisturbed"))
