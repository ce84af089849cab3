"""Freed memory is used again without the kernel's help."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
if sys.argv[1] == "kept":
    from fl_client.allocator import keep_freed_memory
    assert keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [bytearray(b"1") * (16 << 20) for _ in range(4)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    """What asking for four times 16 MiB costs a fresh process when it has just freed as much."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_freed_memory_is_kept():
    """64 MiB are 16,384 pages: without the setting most are new each time, with it next to none."""
    assert page_faults("stock") > 8000
    assert page_faults("kept") < 100
