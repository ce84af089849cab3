"""A run that nothing disturbs, to compare with."""

from __future__ import annotations

import asyncio

import pytest

from tests.fl_server.killed_runs import Undisturbed, run_with_kill


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The outcome and the writes of a run without a kill."""
    outcome, _, writes = asyncio.run(run_with_kill(tmp_path_factory.mktemp("undisturbed")))
    return outcome, writes
