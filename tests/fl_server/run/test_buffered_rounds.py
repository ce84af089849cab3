"""A coordinator's run with a buffer: its ledger, its kills, and what clients are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fl_server.buffered_runs import ROUNDS, buffered_run, models_of
from tests.marks import slow_except

DEATHS = range(11, 50)
"""Writes from the first draw to the last commits; how many there are depends on the order of arrival."""


async def test_the_models_follow_from_the_order_in_the_ledger(tmp_path: Path) -> None:
    """Another engine makes them from the lists and the devices' bytes alone."""
    digests, lists, updates, _ = await buffered_run(tmp_path / "run")
    assert len(digests) == ROUNDS
    assert models_of(tmp_path / "again", lists, updates) == digests


@pytest.mark.parametrize("dies_at", slow_except(DEATHS, *DEATHS[::12]))
async def test_a_kill_after_any_write_loses_nothing(tmp_path: Path, dies_at: int) -> None:
    """The order in the ledger makes the same models. A counted device has its outcome, and no other has one."""
    digests, lists, updates, devices = await buffered_run(tmp_path / "run", dies_at)
    assert models_of(tmp_path / "again", lists, updates) == digests
    counted = {(client, version) for taken in lists for client, version, _ in taken}
    told = {(device.name, key[1]) for device in devices for key, outcome in device.outcomes.items() if outcome.counted}
    assert told <= counted
