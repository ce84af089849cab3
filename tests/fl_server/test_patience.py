"""Waiting for a stream: by the bytes that it brings."""

from __future__ import annotations

import asyncio

import pytest

from fl_server.config import LimitsConfig
from fl_server.patience import Patience


async def test_time_is_given_for_a_chunk_of_bytes() -> None:
    """What was waited is gone, whatever came, until as much as a chunk has come; then all of it is there again."""
    patience = Patience(LimitsConfig(stall_s=60.0, chunk_bytes=65536))
    await patience.wait(asyncio.sleep(0.01))
    left = patience.left_s
    patience.came(65535)
    assert patience.left_s == left < 60.0
    patience.came(1)
    assert patience.left_s == 60.0


async def test_nothing_is_waited_for_too_long() -> None:
    """The words have both limits."""
    patience = Patience(LimitsConfig(stall_s=0.01, chunk_bytes=65536))
    with pytest.raises(TimeoutError):
        await patience.wait(asyncio.Event().wait())
    assert str(patience) == "less than a chunk of 65536 bytes came in 0.01 s"
