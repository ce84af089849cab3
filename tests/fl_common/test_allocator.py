"""The allocator reuses freed memory: in training without the kernel, in a coordinator across threads."""

from __future__ import annotations

import platform
import subprocess
import sys
import weakref

import pytest

from fl_common.allocator import free_what_failed

SERVING = """
import re, sys, threading
from pathlib import Path
from fl_common.allocator import give_back_freed_memory, share_one_heap
if sys.argv[1] == "shared":
    assert share_one_heap()
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
kept = []
def messages():
    pieces = [bytearray(b"1") * (100 << 10) for _ in range(1000)]
    kept.append(pieces[-1])
for _ in range(3):
    thread = threading.Thread(target=messages)
    thread.start(), thread.join()
before = resident()
give_back_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_what_is_free_inside_the_heap_can_be_given_back() -> None:
    """100 MB of messages with one behind them that stays: the kernel has most of it back when it is asked to."""
    run = subprocess.run([sys.executable, "-c", SERVING, "shared"], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 50


class Large:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_failed_computation_held_is_free_and_its_error_is_whole() -> None:
    """Objects of its frames, of those that raised the cause too."""
    held: list[weakref.ref[Large]] = []

    def fail() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise ValueError("too large")

    def explain() -> None:
        large = Large()
        held.append(weakref.ref(large))
        try:
            fail()
        except ValueError as error:
            raise RuntimeError("refused") from error

    with pytest.raises(RuntimeError, match="^refused$") as caught:
        explain()
    free_what_failed(caught.value)
    assert [reference() for reference in held] == [None, None]
    assert str(caught.value.__cause__) == "too large"


TRAINING = """
import resource, sys
if sys.argv[1] == "kept":
    from fl_common.allocator import keep_freed_memory
    assert keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [bytearray(b"1") * (16 << 20) for _ in range(4)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """What asking for four times 16 MiB costs a fresh process when it has just freed as much."""
    run = subprocess.run([sys.executable, "-c", TRAINING, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_freed_memory_is_kept() -> None:
    """64 MiB are 16,384 pages: without the setting most are new each time, with it next to none."""
    assert page_faults("stock") > 8000
    assert page_faults("kept") < 100
