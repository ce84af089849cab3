"""One federation for each test file, and the digests of an undisturbed honest run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.federation import Federation
from tests.processes.process import Workspace


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A coordinator and three honest daemons with a new user's settings, shared because their start is slow."""
    with Workspace(tmp_path_factory.mktemp("hostile")) as workspace:
        yield Federation(workspace)


@pytest.fixture(scope="module")
def undisturbed(federation: Federation) -> list[str]:
    """Digests of the rounds of an undisturbed honest run."""
    return federation.server.digests(federation.begin_run())
