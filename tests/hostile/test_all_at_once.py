"""All attacks together: the coordinator's memory and the honest runs."""

from __future__ import annotations

import pytest

from tests.hostile.all_at_once import names, play
from tests.hostile.federation import Federation
from tests.processes.process import Workspace

MEMORY_RATIO = 1.5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_attacks_at_once_for_two_minutes(workspace: Workspace) -> None:
    """The coordinator's peak stays within 1.5 times its usual, and every honest run ends with the same bits."""
    result = play(Federation(workspace), 120.0, names())
    assert not result.failed
    assert result.same_bits
    assert result.attacked.runs > 0
    assert result.attacked.peak_mib <= MEMORY_RATIO * result.usual.peak_mib
