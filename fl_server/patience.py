"""How long a stream is waited for: by what it brings, not by how often it says something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from fl_server.config import LimitsConfig

T = TypeVar("T")


class Patience:
    """With one stream: `stall_s` of waiting for each `chunk_bytes`, however small its messages are.

    Only waiting for the client counts; what the coordinator's own disk takes is not the client's fault.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.left_s = limits.stall_s
        """Of waiting, before a chunk's worth of bytes must have come."""
        self._missing = limits.chunk_bytes

    def __str__(self) -> str:
        return f"less than a chunk of {self._limits.chunk_bytes} bytes came in {self._limits.stall_s:g} s"

    async def wait(self, coming: Awaitable[T]) -> T:
        """What comes. Raises TimeoutError when too little came for too long."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.left_s):
                return await coming
        finally:
            self.left_s = max(0.0, self.left_s - (time.monotonic() - began))

    def came(self, count: int) -> None:
        """So many bytes came."""
        self._missing -= count
        if self._missing <= 0:
            self.left_s, self._missing = self._limits.stall_s, self._limits.chunk_bytes
