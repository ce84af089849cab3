"""Effects of a simulated process: writes to its disk, transactions of its ledger, requests to its object store.

At each of them faults happen.

`installed` replaces the functions by which the product writes files. A process that is dead has no further effects. A
file that was written but not flushed loses its buffer with the process, as a real one does.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import fcntl
import io
import os
import random
import secrets
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from unittest import mock

import safetensors.torch
from sqlalchemy import Engine, event
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

from fl_server.store import checkpoint_files
from fl_server.store.database.engines import sqlite_engine
from fl_server.store.errors import StoreUnavailable
from tests.deterministic.clocks import VIRTUAL
from tests.deterministic.loop import CURRENT, Killed, Process, VirtualLoop

T = TypeVar("T")
Directive = Literal["", "before", "after", "torn", "full", "away", "unknown", "late"]
"""What happens at an effect: nothing; a SIGKILL before it, after it or half way; a disk that is full; a database or
store that is away before the effect, or after it, so that its result is unknown; a SIGKILL, and the effect later."""
LATEST_S = 20.0

Watch = Callable[[Process, str], Directive]
"""Called for each effect with its process and its name; says what happens to it."""

_OS = ("pwrite", "ftruncate", "posix_fallocate", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "fsync",
       "link")  # fmt: skip
_OPENERS: tuple[tuple[Any, str], ...] = ((io, "open"), (builtins, "open"), (os, "fdopen"))
_NEVER_FULL = frozenset({"unlink", "remove", "rmdir", "ftruncate"})
"""Calls that need no room."""
_READING = frozenset({"r", "rb"})
_BUFFER = 1 << 16


class Effects:
    """The effects of all processes of one life."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.objects: Any = None
        """The coordinator's object store; None without one."""

    def perform(
        self,
        name: str,
        work: Callable[[], T],
        torn: Callable[[], object] | None = None,
        late: Callable[[], object] | None = None,
    ) -> T:
        """Do the work of an effect, or what happens in place of it. torn: does half of it; late: after a death."""
        process = CURRENT.get()
        if process is None:
            return work()
        if not process.alive:
            raise Killed
        what = self.watch(process, name)
        if what == "full" and name.partition(":")[2] not in _NEVER_FULL:
            raise OSError(errno.ENOSPC, "no space left on the simulated device")
        if what == "away":
            raise StoreUnavailable(f"the simulated {name.partition(':')[0]} is away")
        if what in ("before", "torn", "late"):
            if what == "torn" and torn is not None:
                torn()
            if what == "late" and late is not None:
                loop: Any = asyncio.get_running_loop()
                loop.call_later(loop.random.uniform(0.0, LATEST_S), late, context=Context())
            process.kill()
            raise Killed
        result = work()
        if what == "unknown":
            raise StoreUnavailable(f"the simulated {name.partition(':')[0]} went away before its answer")
        if what == "after":
            process.kill()
            raise Killed
        return result


class _File:
    """A file opened for writing. Its buffer reaches the disk as one effect."""

    def __init__(self, file: Any, effects: Effects) -> None:
        self._file, self._effects, self._buffer = file, effects, bytearray()

    def __getattr__(self, name: str) -> Any:
        if name in ("fileno", "seek", "tell", "truncate", "read", "readinto"):
            self.flush()
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._file)

    def write(self, data: Any) -> int:
        text = data.encode() if isinstance(data, str) else data
        self._buffer += text
        if len(self._buffer) >= _BUFFER:
            self.flush()
        return len(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._buffer:
            return
        data, self._buffer = bytes(self._buffer), bytearray()
        raw = getattr(self._file, "buffer", self._file)

        def put(content: bytes) -> None:
            raw.write(content)
            self._file.flush()

        self._effects.perform("file:write", lambda: put(data), lambda: put(data[: len(data) // 2]))

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


def _opening(effects: Effects, opened: Callable[..., Any]) -> Callable[..., Any]:
    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode in _READING or CURRENT.get() is None or not set(mode) & set("wax+"):
            return opened(file, mode, *args, **kwargs)
        made = effects.perform("file:open", lambda: opened(file, mode, *args, **kwargs))
        return _File(made, effects)

    return opening


def _calling(effects: Effects, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def calling(*args: Any, **kwargs: Any) -> Any:
        torn = None
        if name == "pwrite":
            file, data, offset = args
            half = bytes(data)[: len(data) // 2]

            def torn() -> None:
                call(file, half, offset)

        return effects.perform(f"file:{name}", lambda: call(*args, **kwargs), torn)

    return calling


def _saving(effects: Effects, save: Callable[..., Any]) -> Callable[..., Any]:
    def saving(tensors: Any, path: Any, **kwargs: Any) -> None:
        def torn() -> None:
            save(tensors, path, **kwargs)
            os.truncate(path, Path(path).stat().st_size // 2)

        effects.perform("file:save", lambda: save(tensors, path, **kwargs), torn)

    return saving


class _Locks:
    """Locks of files, which the kernel releases when their process ends. Its descriptors stay open here."""

    def __init__(self) -> None:
        self._flock, self._close = fcntl.flock, os.close
        self._held: dict[int, Process] = {}
        """Descriptor -> who has locked its file."""

    def flock(self, descriptor: int, operation: int) -> None:
        """In place of `fcntl.flock`."""
        self._flock(descriptor, operation)
        process = CURRENT.get()
        if process is not None and operation & fcntl.LOCK_EX:
            self._held[descriptor] = process
            process.on_kill.append(lambda: self._release(descriptor, process))

    def close(self, descriptor: int) -> None:
        """In place of `os.close`."""
        self._held.pop(descriptor, None)
        self._close(descriptor)

    def _release(self, descriptor: int, process: Process) -> None:
        if self._held.get(descriptor) is process:
            del self._held[descriptor]
            self._flock(descriptor, fcntl.LOCK_UN)


class _Dialect(SQLiteDialect_pysqlite):
    """All engines share what is compiled for one of them."""

    supports_statement_cache = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Dialect)

    def __hash__(self) -> int:
        return hash(_Dialect)


_COMPILED: LRUCache[Any, Any] = LRUCache(500)
"""Statements that some life has compiled."""


def ledger_engine(path: Any, effects: Effects, process: Process) -> Engine:
    """The engine of a process' ledger, whose write transactions are effects. Its connection ends with the process."""
    engine = sqlite_engine(path)
    engine.dialect.__class__ = _Dialect
    engine.update_execution_options(compiled_cache=_COMPILED)
    connections: list[Any] = []
    writes = [False]
    commit = engine.dialect.do_commit

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        connections.append(connection)

    @event.listens_for(engine, "commit")
    def committing(connection: Any) -> None:
        writes[0] = not connection.get_execution_options().get("reads")

    def do_commit(connection: Any) -> None:
        if writes[0]:
            effects.perform("ledger:commit", lambda: commit(connection))
        else:
            commit(connection)

    engine.dialect.do_commit = do_commit  # type: ignore[method-assign, assignment]  # of this engine alone

    def end() -> None:
        del engine.dialect.do_commit  # compiled statements keep their dialect, which would keep the life
        for connection in connections:
            with suppress(sqlite3.ProgrammingError):  # it is closed already
                connection.rollback()
                connection.close()

    process.on_kill.append(end)
    return engine


@contextmanager
def installed(effects: Effects, loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Replace clocks, randomness and the functions that write files for the time of one life."""
    draw = random.Random(f"secrets {seed}")

    def wall() -> float:
        process = CURRENT.get()
        return loop.time() + (process.epoch if process else 0.0)

    clocks = {"time": wall, "monotonic": lambda: loop.time() + 1000.0, "perf_counter": loop.time}
    changed: list[tuple[Any, str, Any]] = [
        *((os, name, _calling(effects, name, getattr(os, name))) for name in _OS),
        *((module, name, _opening(effects, getattr(module, name))) for module, name in _OPENERS),
        (checkpoint_files, "save_file", _saving(effects, safetensors.torch.save_file)),
        (secrets, "token_hex", lambda count=16: draw.randbytes(count).hex()),
        (os, "urandom", random.Random(f"urandom {seed}").randbytes),
        (secrets, "token_bytes", draw.randbytes),
        (uuid, "uuid4", lambda: uuid.UUID(int=draw.getrandbits(128), version=4)),
    ]
    locks = _Locks()
    changed += [(fcntl, "flock", locks.flock), (os, "close", locks.close)]
    state = random.getstate()
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(VIRTUAL, clocks))
        for owner, name, replacement in changed:
            patches.enter_context(mock.patch.object(owner, name, replacement))
        random.seed(f"jitter {seed}")
        try:
            yield
        finally:
            random.setstate(state)
