"""How the C library deals with memory that rounds free: a coordinator lives long, and models are large."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Names of glibc's malloc.h."""
_MIB = 1 << 20


def share_one_heap() -> bool:
    """Ask glibc for one heap, and models outside of it; False, and nothing done, with another library.

    By itself it gives every thread a heap, in which the messages of a round leave holes that no other thread uses, and
    after a few frees it puts models into heaps too. A heap's free end is kept up to the size of a few messages: given
    back at once, the kernel would have to clear it for the next block of every sum.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = {_ARENA_MAX: 1, _MMAP_THRESHOLD: 4 * _MIB, _TRIM_THRESHOLD: 16 * _MIB}
    return all(mallopt(option, value) == 1 for option, value in options.items())


def give_back_freed_memory() -> None:
    """Ask glibc to give the kernel what is free inside its heaps too; with another library nothing is done."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
