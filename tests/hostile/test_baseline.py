"""The basis of the other tests: without an attack the honest run has the same bits every time."""

from __future__ import annotations

import pytest

from tests.hostile.federation import Federation, Memory


@pytest.mark.slow
def test_an_honest_run_ends_with_the_same_bits_every_time(federation: Federation, undisturbed: list[str]) -> None:
    """Two runs of the same seed, one after the other, over mTLS."""
    assert len(undisturbed) == 3
    federation.still_works(undisturbed, federation.begin_run())


def test_the_peak_of_memory_can_be_reset(federation: Federation) -> None:
    """The peak counts from its last reset."""
    memory = Memory(federation.server.pid)
    memory.forget_peak()
    assert 0 < memory.now() <= memory.peak() < 4096
