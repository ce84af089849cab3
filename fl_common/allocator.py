"""Settings of glibc's memory allocator: a trainer keeps freed memory, a coordinator shares one heap between threads.

With another C library the functions do nothing.
"""

from __future__ import annotations

import ctypes
import gc
import traceback

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""Option numbers of mallopt in glibc's malloc.h."""
_MIB = 1 << 20


def keep_freed_memory() -> bool:
    """Keep up to 2 GiB of freed memory in the process, for training. False with another C library.

    By default glibc returns activations and gradients to the kernel in every step, and the kernel clears the pages for
    the next step. That can take a third of the step. The cost: the process stays at its largest size.
    """
    # One heap for all threads: the heaps of other threads consist of 64 MiB pieces that are unmapped when empty.
    return _set({_ARENA_MAX: 1, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * _MIB, _MMAP_THRESHOLD: 32 * _MIB})


def share_one_heap() -> bool:
    """Use one heap for all threads, and map large blocks outside it, for a coordinator. False with another C library.

    By default glibc gives each thread a heap. A round's messages leave holes there that no other thread can use, and
    after a few frees glibc places models in heaps too. The free end of the heap is kept up to the size of a few
    messages. Otherwise the kernel would have to clear it again for every block of a sum.
    """
    return _set({_ARENA_MAX: 1, _MMAP_THRESHOLD: 4 * _MIB, _TRIM_THRESHOLD: 16 * _MIB})


def give_back_freed_memory() -> None:
    """Return the free memory inside the heaps to the kernel."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_what_failed(error: BaseException) -> None:
    """Free what the frames of a failed computation hold, also if it refers to itself. The error stays as it is.

    Call it where the error is caught, without an await before it: a coroutine of the error that waits would be closed.
    """
    seen: set[int] = set()
    errors = [error]
    while errors:
        cause = errors.pop()
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        linked = (cause.__cause__, cause.__context__)
        errors += [earlier for earlier in linked if earlier is not None and id(earlier) not in seen]
    gc.collect()
    give_back_freed_memory()


def _set(options: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in options.items())
