"""Memory for whole bundles, asked of the kernel in large pages where it has them.

A model comes and goes every round. In pages of 4 KiB, as `bytearray` gets them, the kernel spends longer on handing the
memory out than a bundle takes to be copied into it; in pages of 2 MiB a fifth of that.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import numpy as np

LARGE_BYTES = 4 << 20
"""From here on a buffer is worth pages of its own."""


def zeros(size: int) -> memoryview:
    """A new buffer of `size` bytes, all zero. Raises MemoryError when the machine has not so much."""
    return memoryview(bytearray(size) if size < LARGE_BYTES else _pages(size))


class Recycler:
    """Buffers whose memory is used again once nobody looks at it any more: then not even the kernel has to clear it."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> memoryview:
        """A buffer of `size` bytes, to be written over whole: what stands in it is anything. Raises MemoryError.

        Memory that is free and has another size is given back: whoever takes a larger model has no room for the old.
        """
        if size < LARGE_BYTES:
            return zeros(size)
        free, self._free = self._free, []
        self._free = [pages for pages in free if len(pages) == size]
        pages = self._free.pop() if self._free else _pages(size)
        # Views on views keep the array alive; when the last of them goes, nobody looks at the pages any more.
        lent = np.frombuffer(pages, np.uint8)
        weakref.finalize(lent, self._free_again, pages).atexit = False
        return lent.data

    def _free_again(self, pages: mmap.mmap) -> None:
        self._free.append(pages)


def _pages(size: int) -> mmap.mmap:
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"expected room for {size} bytes, got: {error}") from error
    _ask_for_large_pages(pages)
    return pages


def _ask_for_large_pages(pages: mmap.mmap) -> None:
    """A kernel that was built without them refuses, and nothing else changes."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):
            pages.madvise(advice)
