"""Memory for whole bundles, asked of the kernel in large pages where it has them.

A model comes and goes every round. In pages of 4 KiB, as `bytearray` gets them, the kernel spends longer on handing the
memory out than a bundle takes to be copied into it; in pages of 2 MiB a fifth of that.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

LARGE_BYTES = 4 << 20
"""From here on a buffer is worth pages of its own."""


def zeros(size: int) -> memoryview:
    """A new buffer of `size` bytes, all zero. Raises MemoryError when the machine has not so much."""
    if size < LARGE_BYTES:
        return memoryview(bytearray(size))
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"expected room for {size} bytes, got: {error}") from error
    _ask_for_large_pages(pages)
    return memoryview(pages)


def _ask_for_large_pages(pages: mmap.mmap) -> None:
    """A kernel that was built without them refuses, and nothing else changes."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):
            pages.madvise(advice)
