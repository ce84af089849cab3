"""Memory that rounds free is shared by all threads, and can be given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import re, sys, threading
from pathlib import Path
from fl_server.allocator import give_back_freed_memory, share_one_heap
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
def test_what_is_free_inside_the_heap_can_be_given_back():
    """100 MB of messages with one behind them that stays: the kernel has most of it back when it is asked to."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, "shared"], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 50
