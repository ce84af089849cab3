"""Coordinators with a page, for all tests of a file."""

from __future__ import annotations

import pytest

from tests.processes.federation import Coordinator
from tests.processes.process import Workspace


@pytest.fixture(scope="module")
def plain(module_workspace: Workspace) -> Coordinator:
    """A coordinator without certificates, with a page."""
    return Coordinator(module_workspace, "plain", {"web_listen": "127.0.0.1:0"}).serve()
