"""One federation for all tests of a module, and what an honest run ends with when nobody is hostile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.federation import Federation
from tests.integration.conftest import pytest_runtest_makereport
from tests.integration.processes import Place

__all__ = ["pytest_runtest_makereport"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A coordinator and three honest daemons with a new user's settings. Starting them is what costs time."""
    with Place(tmp_path_factory.mktemp("hostile")) as place:
        yield Federation(place)


@pytest.fixture(scope="module")
def undisturbed(federation: Federation) -> list[str]:
    """Digests of the rounds of an honest run when nothing happens to it."""
    return federation.server.digests(federation.begin_run())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A folder for processes of one test."""
    with Place(tmp_path) as place:
        yield place
