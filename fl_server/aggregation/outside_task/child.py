"""The processes of tasks: what one does, the messages with the coordinator, and the process that forks them.

A process of a task loads the task, makes its model and evaluates. A message is a header in JSON, and the bytes of
bundles.

The process that forks them is forked itself when the coordinator starts: it has torch and our packages in memory, a
single thread, and nothing of the state. It ends with the coordinator, also when that is killed, and takes the processes
of tasks with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch

import algorithms as fl
from algorithms.outside_code import described, is_of_the_machine
from fl_common.allocator import give_back_freed_memory
from fl_server.aggregation.evaluation import EvaluatedModel
from fl_server.aggregation.task_model import CPU, packed, with_own
from fl_server.errors import InvalidInput
from fl_tasks import Task, TaskError, fingerprint, load_task
from fl_tasks.errors import is_own_fault
from fl_tasks.metrics import declared_directions
from fl_tasks.own_loop import own_loop
from fl_tasks.summed_metrics import PlainSum, Pool
from protos.buffers import zeros
from protos.codec import Layout, unpack
from protos.fl.v1.tensor_pb2 import Manifest

T = TypeVar("T")
MAX_HEADER = 64 << 20
"""Bytes of a header. It has the names and shapes of all tensors, or metrics."""
_LENGTH = struct.Struct("<I")
MAX_BUNDLE = 1 << 50
"""Bytes of a bundle; the coordinator's own limit for updates is checked when the run is created."""
Reply = tuple[Mapping[str, object], list[memoryview]]
_MESSAGE = 4096
_PR_SET_PDEATHSIG = 1
_statuses: dict[int, int] = {}
"""Wait statuses of processes that were ended before somebody asked."""


class Closed(Exception):
    """The other process has ended, or sends what is no message."""


def send(connection: socket.socket, header: Mapping[str, object], bundles: Sequence[memoryview] = ()) -> None:
    """Send a message. Raises OSError."""
    text = json.dumps(header).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    for bundle in bundles:
        connection.sendall(bundle)


def receive(connection: socket.socket, ends: float | None = None) -> dict[str, Any]:
    """Receive a header. ends: by the monotonic clock; None: no limit. Raises Closed, TimeoutError."""
    (length,) = _LENGTH.unpack(receive_bundle(connection, _LENGTH.size, ends))
    if length > MAX_HEADER:
        raise Closed
    try:
        header = json.loads(bytes(receive_bundle(connection, length, ends)))
    except ValueError as error:
        raise Closed from error
    if not isinstance(header, dict):
        raise Closed
    return header


def receive_bundle(connection: socket.socket, size: int, ends: float | None = None) -> memoryview:
    """Receive a bundle of so many bytes. Raises as `receive`."""
    buffer, done = zeros(size), 0
    while done < size:
        if ends is not None and (left := ends - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(None if ends is None else left)
        try:
            count = connection.recv_into(buffer[done:])
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed from error
        if not count:
            raise Closed
        done += count
    return buffer


def layout_text(layout: Layout) -> str:
    """A layout as text."""
    return layout.to_manifest().SerializeToString().hex()


def layout_of(text: str) -> Layout:
    """The layout of a text. Raises LayoutError, or ValueError for no such text."""
    manifest = Manifest.FromString(bytes.fromhex(text))
    return Layout.from_manifest(manifest, MAX_BUNDLE)


def serve(connection: socket.socket) -> None:
    """Answer the coordinator's requests until it closes the connection. Raises Closed then."""
    hosted = _Hosted(connection)
    while True:
        request = receive(connection)
        try:
            header, bundles = hosted.answer(request)
        except InvalidInput as error:
            detail = error.detail
            header, bundles = {"input": [detail.field, detail.expected, detail.came]}, []
        except TaskError as error:
            header, bundles = {"task": f"{error}{_hint(error)}", "own": is_own_fault(error)}, []
        except BaseException as error:  # noqa: BLE001 - whatever it is, the coordinator is told
            told = f"the task raised {described(error)}{_hint(error)}"
            header, bundles = {"task": told, "own": not is_of_the_machine(error)}, []
        send(connection, header, bundles)
        del bundles
        give_back_freed_memory()


def _hint(error: BaseException) -> str:
    """What to do where memory is the cause."""
    cause = error.__cause__ or error
    without = isinstance(cause, MemoryError) or "allocate memory" in str(cause)
    return "; its process may take no more memory (limits.task_memory_mib)" if without else ""


class _Hosted:
    """The task of this process, and its model."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._task: Task | None = None
        self._model: EvaluatedModel | None = None
        self._frozen = Layout((), 0)

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """The reply to a request. Its bundles are read in any case, so that the next request is in its place."""
        bundles = [receive_bundle(self._connection, size) for size in request.get("sizes", ())]
        methods: dict[str, Callable[..., Reply]] = {
            "load": self._load, "model": self._build, "first": self._first, "evaluate": self._evaluate,
            "names": self._names,
            "pool": self._pool,
        }  # fmt: skip
        given = {name: value for name, value in request.items() if name not in ("do", "sizes")}
        return methods[request["do"]](*bundles, **given)

    def _load(  # noqa: PLR0913 - what the coordinator has
        self, *, name: str, options: Mapping[str, object], here: Mapping[str, object], path: list[str], folder: str,
        threads: int,
    ) -> Reply:  # fmt: skip
        sys.path[:] = path
        os.chdir(folder)
        torch.set_num_threads(threads)
        # The coordinator has checked that it may be loaded.
        self._task = load_task(name, with_own(name, options, here, [name]), [name])
        return {
            "fingerprint": fingerprint(self._task),
            "own_loop": own_loop(self._task) is not None,
            "directions": dict(declared_directions(self._task)),
        }, []

    def _build(self, batch_size: int, options: Mapping[str, Any]) -> Reply:
        self._model = model = EvaluatedModel(_there(self._task), CPU, batch_size, **options)
        frozen = model.local_frozen
        return {
            "layout": layout_text(model.layout),
            "trainable": layout_text(model.trainable_layout),
            "tied": model.tied,
            "remarks": list(model.remarks),
            "local_frozen": None if frozen is None else frozen.SerializeToString().hex(),
        }, []

    def _first(self, path: str) -> Reply:
        model = _there(self._model)
        with model.first(path) as state:
            self._frozen = Layout.of(state.frozen)
            bundles = [packed({**state.trainable, **state.buffers}, model.layout), packed(state.frozen, self._frozen)]
            copies = [memoryview(bytes(bundle)) for bundle in bundles]  # the model's own memory is released
        return {"frozen": layout_text(self._frozen)}, copies

    def _evaluate(self, sent: memoryview, frozen: memoryview, frozen_layout: str, *, estimate: bool = False) -> Reply:
        model = _there(self._model)
        metrics = model.evaluate(_values(model, sent, frozen, frozen_layout), estimate=estimate)
        return {"metrics": {name: float(value).hex() for name, value in metrics.items()}}, []

    def _names(self, sent: memoryview, frozen: memoryview, frozen_layout: str) -> Reply:
        model = _there(self._model)
        return {"names": model.names(_values(model, sent, frozen, frozen_layout))}, []

    def _pool(self, sums: list[PlainSum]) -> Reply:
        pool = Pool()
        pool.add(sums)
        values, problems = pool.values(_there(self._task))
        return {"values": {name: value.hex() for name, value in values.items()}, "problems": problems}, []


def _values(model: EvaluatedModel, sent: memoryview, frozen: memoryview, frozen_layout: str) -> fl.ModelState:
    tensors = unpack(sent, model.layout)
    trainable = {entry.name for entry in model.layout.entries if entry.trainable}
    return fl.ModelState(
        {name: tensor for name, tensor in tensors.items() if name in trainable},
        {name: tensor for name, tensor in tensors.items() if name not in trainable},
        unpack(frozen, layout_of(frozen_layout)),
    )


def _there(part: T | None) -> T:
    if part is None:
        raise RuntimeError("expected a task that is loaded and has a model")
    return part


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
        serve(connection)
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
