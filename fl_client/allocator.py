"""How the C library deals with memory that training frees and asks for again in every step."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""Names of glibc's malloc.h."""
_MIB = 1 << 20


def keep_freed_memory() -> bool:
    """Ask glibc to keep what is freed, up to 2 GiB, for the next step; False, and nothing done, with another library.

    By itself it gives activations and gradients back to the kernel in every step and has the kernel clear them for the
    next, which can cost a third of the step. The price: a process stays at the size of its busiest moment.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One heap for all threads: those of other threads are cut in pieces of 64 MiB that are unmapped when empty.
    options = {_ARENA_MAX: 1, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * _MIB, _MMAP_THRESHOLD: 32 * _MIB}
    return all(mallopt(option, value) == 1 for option, value in options.items())
