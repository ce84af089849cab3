"""One arena for a worker's tests, and a failed test that shows what its processes said last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.arena import Arena
from tests.integration.conftest import pytest_runtest_makereport
from tests.integration.processes import HERE, Place

__all__ = ["pytest_runtest_makereport"]


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """One for all plans of a file: starting processes is what costs time."""
    with Place(tmp_path_factory.mktemp("arena")) as place, Arena(place) as arena:
        yield arena


@pytest.fixture(autouse=True)
def _task_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay needs the daemons' task."""
    monkeypatch.syspath_prepend(HERE)
