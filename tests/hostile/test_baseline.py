"""What the other tests here rely on: without any attack the honest run has the same bits every time."""

from __future__ import annotations

from tests.hostile.federation import Memory


def test_an_honest_run_ends_with_the_same_bits_every_time(federation, undisturbed):
    """Two runs of the same seed, one after the other, over mTLS."""
    assert len(undisturbed) == 4
    federation.still_works(undisturbed, federation.begin_run())


def test_the_peak_of_memory_is_measured_anew(federation):
    """A peak counts from the moment at which the last one was forgotten."""
    memory = Memory(federation.server.pid)
    memory.forget_peak()
    assert 0 < memory.now() <= memory.peak() < 4096
