"""A spooled update that is torn while the coordinator is down, with real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.marks import slow_except
from tests.processes.federation import Fleet


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    """Remove the second half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", slow_except([flip, truncate], truncate))
def test_a_damaged_update_is_sent_again_by_its_daemon(
    fleet: Fleet, undisturbed: list[str], damage: Callable[[Path], None]
) -> None:
    """Its row is removed from the ledger. The daemon keeps the update until its outcome and does not train again."""
    run = f"torn-{damage.__name__}"
    quick, slow = fleet.half_delivered(run)
    quick.logged("submitted", run=run, round=0)
    fleet.server.kill()
    (spooled,) = Path(fleet.server.settings["state_dir"]).glob(f"spool/run-{run}/round-000000/*/*.update")
    damage(spooled)
    fleet.server.serve()
    fleet.server.logged("update_dropped", run=run, round=0)
    quick.logged("submitted", count=2, run=run, round=0)
    slow.hold.unlink()
    assert undisturbed == fleet.server.digests(run)
    assert len(quick.events("trained", run=run, round=0)) == 1
    assert fleet.server.history(run).count("update_dropped") == 1
