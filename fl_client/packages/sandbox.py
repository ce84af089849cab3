"""Limits of the process in which the code of a package runs: memory, files, processes, network.

The kernel's filter of system calls (seccomp) takes away: other programs and processes, the network, and looking into
or signalling other processes. Threads stay, since torch has some. What is left is what the daemon's user may read and
write, so the service's own unit limits that.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from typing import Any

# fmt: off
MACHINES = {
    "x86_64": (
        0xC000003E, 317, 56, 435, 234, 59, 322, 57, 58, 41, 62, 200, 129, 297, 101, 310, 311, 434, 438, 424, 425,
    ),
    "aarch64": (0xC00000B7, 277, 220, 435, 131, 221, 281, 198, 129, 130, 138, 240, 117, 270, 271, 434, 438, 424, 425),
}
# fmt: on
"""Numbers by machine: of its audit, and of seccomp, clone, clone3 and tgkill; then of calls that are refused:
execve, execveat, fork and vfork (x86_64), socket, kill, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, ptrace,
process_vm_readv, process_vm_writev, pidfd_open, pidfd_getfd, pidfd_send_signal, io_uring_setup."""
_CLONE_THREAD = 0x00010000
_LOAD, _EQUAL, _AT_LEAST, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
_NO_NEW_PRIVILEGES, _SET_FILTER, _ALL_THREADS = 38, 1, 1
_OTHER_TABLE = 0x40000000
"""The numbers of another table of x86_64 begin here."""


def limit(memory_bytes: int, file_bytes: int, open_files: int) -> None:
    """Limit this process for good.

    Args:
        memory_bytes: that it may take beyond what it has now.
        file_bytes: of the largest file that it may write.
        open_files: at once.

    Raises:
        OSError: this is no Linux on x86_64 or aarch64, or the kernel refuses the filter.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_FSIZE, file_bytes)
    _limit(resource.RLIMIT_NOFILE, open_files)
    _limit(resource.RLIMIT_DATA, _data_bytes() + memory_bytes)
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123 - it is no file of ours
        file.write("1000")  # without memory the kernel ends this process before the daemon
    _filter_calls(platform.machine())


def _limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


def _data_bytes() -> int:
    """Memory of its own that this process has now."""
    with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123 - it is no file of ours
        return next(int(line.split()[1]) for line in file if line.startswith("VmData:")) << 10


def _filter_calls(machine: str) -> None:
    if sys.platform != "linux" or machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"packages need Linux on {' or '.join(MACHINES)}, got {sys.platform} {machine}")
    program = _program(machine)
    instructions = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    given = Program(len(program) // 8, ctypes.cast(instructions, ctypes.c_void_p))
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if libc.syscall(MACHINES[machine][1], _SET_FILTER, _ALL_THREADS, ctypes.byref(given)):
        number = ctypes.get_errno()
        raise OSError(number, f"the filter of system calls is refused: {os.strerror(number)}")


def _program(machine: str) -> bytes:
    """The filter: each refused call is a comparison and an answer."""
    audit, _, clone, clone3, tgkill, *refused = MACHINES[machine]

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    def answer(number: int) -> bytes:
        return step(_RETURN, _ERRNO | number)

    parts = [step(_LOAD, _ARCH), step(_EQUAL, audit, 1, 0), step(_RETURN, _KILL), step(_LOAD, _NUMBER)]
    # glibc falls back to clone, whose flags the filter can read.
    parts += [step(_EQUAL, clone3, 0, 1), answer(errno.ENOSYS)]
    parts += [step(_EQUAL, clone, 0, 4), step(_LOAD, _ARGUMENT), step(_HAS, _CLONE_THREAD, 0, 1)]
    parts += [step(_RETURN, _ALLOW), answer(errno.EPERM)]
    parts += [step(_EQUAL, tgkill, 0, 4), step(_LOAD, _ARGUMENT), step(_EQUAL, os.getpid(), 0, 1)]
    parts += [step(_RETURN, _ALLOW), answer(errno.EPERM)]  # abort() signals its own process
    for number in refused:
        parts += [step(_EQUAL, number, 0, 1), answer(errno.EPERM)]
    if machine == "x86_64":
        parts += [step(_AT_LEAST, _OTHER_TABLE, 0, 1), answer(errno.EPERM)]
    return b"".join([*parts, step(_RETURN, _ALLOW)])
