"""The stall timeout of a stream, by received bytes."""

from __future__ import annotations

import asyncio

import pytest

from fl_server.settings.sections import LimitsConfig
from fl_server.uploads.stream import StallTimeout


async def test_a_chunk_of_bytes_resets_the_timeout() -> None:
    """Waiting uses up the time, and fewer bytes than a chunk do not change that. A whole chunk resets it."""
    timeout = StallTimeout(LimitsConfig(stall_s=60.0, chunk_bytes=65536))
    await timeout.wait(asyncio.sleep(0.01))
    left = timeout.left_s
    timeout.received(65535)
    assert timeout.left_s == left < 60.0
    timeout.received(1)
    assert timeout.left_s == 60.0


async def test_a_wait_ends_at_the_timeout() -> None:
    """The text names both limits."""
    timeout = StallTimeout(LimitsConfig(stall_s=0.01, chunk_bytes=65536))
    with pytest.raises(TimeoutError):
        await timeout.wait(asyncio.Event().wait())
    assert str(timeout) == "less than a chunk of 65536 bytes came in 0.01 s"
