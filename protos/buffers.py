"""Memory for whole bundles, in large pages if the kernel has them.

Each round allocates and frees models. With the 4 KiB pages of a `bytearray`, the kernel needs longer to provide the
memory than it takes to copy a bundle into it. With 2 MiB pages it needs a fifth of that time. The module is part of
`protos` because packing a bundle uses it.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import numpy as np

LARGE_BYTES = 4 << 20
"""Buffers of at least this size get pages of their own."""


def zeros(size: int) -> memoryview:
    """A new buffer of `size` zero bytes. Raises MemoryError if there is not enough memory."""
    return memoryview(bytearray(size) if size < LARGE_BYTES else _pages(size))


class BufferPool:
    """Buffers whose memory is reused when nothing refers to it any longer, so that the kernel need not clear it."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> memoryview:
        """A buffer of `size` bytes with arbitrary content, to be overwritten completely. Raises MemoryError.

        Free memory of another size is released, so that a larger model does not need memory in addition to the old one.
        """
        if size < LARGE_BYTES:
            return zeros(size)
        free, self._free = self._free, []
        self._free = [pages for pages in free if len(pages) == size]
        pages = self._free.pop() if self._free else _pages(size)
        # Views of views keep the array alive. When the last view is gone, nothing refers to the pages.
        lent = np.frombuffer(pages, np.uint8)
        weakref.finalize(lent, self._release, pages).atexit = False
        return lent.data

    def _release(self, pages: mmap.mmap) -> None:
        self._free.append(pages)


def _pages(size: int) -> mmap.mmap:
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"expected memory for {size} bytes, got: {error}") from error
    _ask_for_large_pages(pages)
    return pages


def _ask_for_large_pages(pages: mmap.mmap) -> None:
    """A kernel without large pages refuses, and the memory is usable all the same."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):
            pages.madvise(advice)
