"""One cluster for each test file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.cluster import ChaosCluster
from tests.processes.process import HERE, Workspace


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    """The cluster of all plans of a file, because starting processes is slow."""
    with Workspace(tmp_path_factory.mktemp("cluster")) as workspace, ChaosCluster(workspace) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _task_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the daemons' task importable for a replay."""
    monkeypatch.syspath_prepend(HERE)
