"""Coordinators with a page, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes.certificates import Pki
from tests.processes.federation import Coordinator
from tests.processes.process import Workspace


@pytest.fixture(scope="module")
def web_workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A folder for the processes."""
    with Workspace(tmp_path_factory.mktemp("web")) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def pki(web_workspace: Workspace) -> Pki:
    """The authority."""
    return Pki(web_workspace.folder / "pki")


@pytest.fixture(scope="module")
def plain(web_workspace: Workspace) -> Coordinator:
    """A coordinator without certificates, with a page."""
    return Coordinator(web_workspace, "plain", {"web_listen": "127.0.0.1:0"}).serve()
