"""The process from which those of tasks are forked.

It is forked itself when the coordinator starts: it has torch and our packages in memory, a single thread, and nothing
of the state. It ends with the coordinator, also when that is killed, and takes the processes of tasks with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

from fl_server.aggregation.outside_task import child

_MESSAGE = 4096
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """Starts and ends processes of tasks. Made in the main thread, before there is a second one."""

    def __init__(self, memory_bytes: int) -> None:
        """memory_bytes: of each process of a task."""
        self.memory_bytes = memory_bytes
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._control.close()
            _serve(other, memory_bytes)
        other.close()

    def start(self) -> tuple[int, socket.socket]:
        """Start a process. Returns its id and the connection to it. Raises OSError."""
        ours, its = socket.socketpair()
        with its, self._lock:
            socket.send_fds(self._control, [json.dumps({"do": "start"}).encode()], [its.fileno()])
            return self._answer(), ours

    def status(self, pid: int) -> int:
        """End a process, if it has not ended, and wait for it. Returns the wait status. Raises OSError."""
        with self._lock:
            self._control.send(json.dumps({"do": "status", "pid": pid}).encode())
            return self._answer()

    def kill(self, pid: int) -> None:
        """End a process. May be called at any time, in any thread."""
        with suppress(OSError):
            self._control.send(json.dumps({"do": "kill", "pid": pid}).encode())

    def close(self) -> None:
        """End all processes of tasks, and this one."""
        self._control.close()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _answer(self) -> int:
        answer = self._control.recv(_MESSAGE)
        if not answer:
            raise OSError("the process that starts those of tasks has ended; restart the coordinator")
        return int(json.loads(answer)["value"])


def _serve(control: socket.socket, memory_bytes: int) -> NoReturn:
    """Do what the coordinator asks for, until it has ended. In the forked process."""
    # The coordinator ends it. A signal to the whole group, as Ctrl-C and systemd send it, must not come first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    alive: set[int] = set()
    with suppress(OSError):
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE, 1)
            if not message:
                break
            request = json.loads(message)
            if request["do"] == "start":
                connection = socket.socket(fileno=descriptors[0])
                pid = os.fork()
                if not pid:
                    control.close()
                    _be_task(connection, memory_bytes)
                connection.close()
                alive.add(pid)
                _answer(control, pid)
                continue
            _kill(request["pid"], alive)
            if request["do"] == "status":
                _answer(control, _wait(request["pid"], alive))
            else:
                _wait(request["pid"], alive)
    for pid in alive:
        _kill(pid, alive)
    os._exit(0)


def _answer(control: socket.socket, value: int) -> None:
    control.send(json.dumps({"value": value}).encode())


def _kill(pid: int, alive: set[int]) -> None:
    """Kill a process and those that it started, which are of its group."""
    if pid in alive:
        for kill in (os.killpg, os.kill):
            with suppress(OSError):
                kill(pid, signal.SIGKILL)


_statuses: dict[int, int] = {}
"""Wait statuses of processes that were ended before somebody asked."""


def _wait(pid: int, alive: set[int]) -> int:
    if pid in alive:
        alive.discard(pid)
        _statuses[pid] = os.waitpid(pid, 0)[1]
    return _statuses.get(pid, 0)


def _be_task(connection: socket.socket, memory_bytes: int) -> NoReturn:
    """Serve one task, in a process of its own."""
    try:
        os.setsid()
        _end_with_parent()
        _limit_memory(memory_bytes)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        child.serve(connection)
    except BaseException:  # noqa: BLE001 - the connection has ended
        os._exit(1)
    os._exit(0)


def _end_with_parent() -> None:
    """Have the kernel end this process with its parent. Elsewhere than on Linux it ends when it is not busy."""
    if sys.platform == "linux":
        parent = os.getppid()
        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write("1000")  # without memory the kernel ends this process before the coordinator


def _limit_memory(memory_bytes: int) -> None:
    """Let allocations fail above so much memory of this process's own, beyond what it has now."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        most = _data_bytes() + memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _data_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def default_memory() -> int:
    """Three quarters of the memory of this machine, or of the container."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:  # noqa: PTH123
        most = min(most, int(file.read()))
    return most * 3 // 4
