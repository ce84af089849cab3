"""Fixtures of the daemon's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.fl_client.fake_coordinator import FakeCoordinator
from tests.fl_client.fleet import Fleet


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    """A coordinator that listens on a free port."""
    async with FakeCoordinator().serving() as serving:
        yield serving


@pytest.fixture
def silent_coordinator() -> FakeCoordinator:
    """A coordinator that the test itself starts and stops."""
    return FakeCoordinator()


@pytest.fixture
def fleet(coordinator: FakeCoordinator, tmp_path: Path) -> Fleet:
    """Daemons of the coordinator."""
    return Fleet(coordinator, tmp_path / "state")


@pytest.fixture
def make_fleet(tmp_path: Path) -> Callable[[FakeCoordinator], Fleet]:
    """Daemons of a coordinator that the test itself starts."""
    return lambda coordinator: Fleet(coordinator, tmp_path / "state")
