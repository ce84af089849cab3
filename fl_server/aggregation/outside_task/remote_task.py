"""A task in a process of its own, as the coordinator uses it. Blocking; called from worker threads."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch

import algorithms as fl
from fl_server.aggregation.outside_task import child
from fl_server.aggregation.task_model import packed
from fl_server.errors import InvalidInput
from fl_server.settings.sections import LimitsConfig
from fl_tasks import TaskError
from fl_tasks.errors import TaskFault, TaskTimedOut
from fl_tasks.evaluation import EvaluationLeft
from fl_tasks.summed_metrics import Pool
from protos.codec import Layout, unpack
from protos.fl.v1.tensor_pb2 import Resource

log = structlog.get_logger()

T = TypeVar("T")

_PROGRESS_S = 30.0
"""Seconds between two log lines while a task's code runs that a creation or a restart waits for."""


@dataclass(frozen=True, slots=True)
class TaskProcesses:
    """Where processes of tasks come from, and their limits."""

    forks: child.ForkServer
    limits: LimitsConfig


class _Process:
    """One process. It ends when nothing refers to this any longer."""

    def __init__(self, processes: TaskProcesses, name: str) -> None:
        self._forks, self._name = processes.forks, name
        try:
            self.pid, self._connection = processes.forks.start()
        except OSError as error:
            raise TaskError(f"no process for task {name} can be started: {error}") from error
        self._turn = threading.Lock()
        self.left = ""
        """Why somebody ended the process; empty if nobody did."""
        weakref.finalize(self, _end, processes.forks, self.pid, self._connection)

    def ask(
        self, what: str, seconds: float, request: Mapping[str, object], bundles: Sequence[memoryview] = ()
    ) -> _Reply:
        """Have the process do something, and return its reply. One call at a time.

        what: for messages. Raises TaskError, of which TaskFault and TaskTimedOut tell the cause; InvalidInput;
        EvaluationLeft.
        """
        with self._turn:
            ends = time.monotonic() + seconds
            sizes = [bundle.nbytes for bundle in bundles]
            try:
                self._connection.settimeout(seconds)
                child.send(self._connection, {**request, "sizes": sizes}, bundles)
                header = self._header(what, ends)
            except TimeoutError:
                why = f"{what} did not end within {seconds:g} s"
                self.end(why)
                raise TaskTimedOut(f"{why}; its process was ended") from None
            except (child.Closed, OSError):
                pass
            else:
                return _Reply(header, self._connection, ends)
            raise self._error(what)

    def _header(self, what: str, ends: float) -> dict[str, Any]:
        """The reply, with a log line while it takes long."""
        over = threading.Event()
        threading.Thread(target=self._log_progress, args=(what, over), name="progress", daemon=True).start()
        try:
            header = child.receive(self._connection, ends)
        finally:
            over.set()
        match header:
            case {"task": str(message)}:
                raise (TaskFault if header.get("own") is True else TaskError)(message)
            case {"input": [str(field), str(expected), str(came)]}:
                raise InvalidInput(field, expected, came)
        return header

    def _log_progress(self, what: str, over: threading.Event) -> None:
        began = time.monotonic()
        while not over.wait(_PROGRESS_S):
            seconds = round(time.monotonic() - began)
            log.info("task_still_working", task=self._name, what=what, seconds=seconds, pid=self.pid)

    def end(self, why: str) -> None:
        """End the process, whatever it does. A call under way raises."""
        self.left = self.left or why
        self._forks.kill(self.pid)

    def _error(self, what: str) -> Exception:
        """Why a call has no reply."""
        try:
            status = self._forks.status(self.pid)
        except OSError as error:
            return TaskError(f"{what}: {error}")
        if self.left:
            return EvaluationLeft(f"{self.left}; its process was ended")
        # The kernel sends SIGKILL when memory runs out; every other end is the code's own.
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        ended = f"{what} ended its process: {_ending(status)}; the coordinator and its other runs go on"
        return (TaskError if killed else TaskFault)(ended)


def _ending(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exit code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    hint = ", as the kernel does it when memory runs out" if number == signal.SIGKILL else ""
    return f"signal {number} ({name}){hint}"


def _end(forks: child.ForkServer, pid: int, connection: socket.socket) -> None:
    connection.close()
    forks.kill(pid)


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply; its bundles come after the header."""

    header: Mapping[str, Any]
    connection: socket.socket
    ends: float

    def bundle(self, layout: Layout) -> fl.Tensors:
        """The next bundle. Raises Closed, TimeoutError, LayoutError."""
        return unpack(child.receive_bundle(self.connection, layout.size_bytes, self.ends), layout)


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What a task states of itself when it is loaded."""

    fingerprint: tuple[str, str]
    own_loop: bool
    directions: Mapping[str, bool]
    """The result of `fl_tasks.metrics.declared_directions`."""

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> TaskFacts:
        """The facts of a reply. Raises KeyError, TypeError, ValueError, AttributeError."""
        version, source = header["fingerprint"]
        directions = {str(name): bool(lower) for name, lower in header["directions"].items()}
        return cls((str(version), str(source)), bool(header["own_loop"]), directions)


class RemoteTask:
    """A task from outside. Its process starts when it is needed, and ends with what uses it."""

    def __init__(
        self, processes: TaskProcesses, name: str, options: Mapping[str, object], here: Mapping[str, object]
    ) -> None:
        """Load the task. options, here: as for `own_options.with_own`. Raises TaskError, InvalidInput."""
        self._processes, self._name, self._options, self._here = processes, name, dict(options), dict(here)
        self._spare: _Process | None
        self._spare, self.facts = self._loaded()

    def _loaded(self) -> tuple[_Process, TaskFacts]:
        process = _Process(self._processes, self._name)
        reply = process.ask(
            f"loading task {self._name}",
            self._processes.limits.task_load_s,
            {
                "do": "load", "name": self._name, "options": self._options, "here": self._here,
                "path": sys.path, "folder": str(Path.cwd()), "threads": torch.get_num_threads(),
            },
        )  # fmt: skip
        log.info("task_loaded", task=self._name, pid=process.pid)
        return process, checked(self._name, lambda: TaskFacts.of(reply.header))

    def release(self) -> None:
        """End the process that no model uses."""
        self._spare = None

    def pooled(self, pool: Pool) -> tuple[dict[str, float], list[str]]:
        """The result of `Pool.values`: metrics over many clients. A process that fails has no value for any."""
        if not pool.metrics:
            return {}, []
        try:
            process = self._spare = self._spare or self._loaded()[0]
            request = {"do": "pool", "sums": pool.plain}
            reply = process.ask("the value of a metric", self._processes.limits.task_load_s, request)
            return checked(
                self._name, lambda: (_metrics(reply.header["values"]), [*map(str, reply.header["problems"])])
            )
        except TaskError as error:
            self._spare = None
            return {}, [str(error)]

    def model(self, batch_size: int, **options: object) -> RemoteModel:
        """Its model, in a process of its own. options: of `TaskModel`, as JSON values.

        Raises TaskError, InvalidInput.
        """
        process, self._spare = self._spare, None
        if process is None:
            process, facts = self._loaded()
            if facts != self.facts:
                raise TaskError(
                    f"task {self._name} has other code than when the run was loaded: restart the coordinator to use it"
                )
        limits = self._processes.limits
        request = {"do": "model", "batch_size": batch_size, "options": options}
        reply = process.ask("the task's model()", limits.task_load_s, request)
        return checked(self._name, lambda: RemoteModel(process, limits, reply.header))


def checked(name: str, read: Callable[[], T]) -> T:
    """What is read from a reply. Raises TaskError for one that no process of ours would send."""
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError, child.Closed, TimeoutError) as error:
        raise TaskError(f"the process of task {name} sent what is no reply: {type(error).__name__}: {error}") from error


class RemoteModel:
    """The model of a task in its process: as `TaskModel`, whose module the coordinator does not have."""

    def __init__(self, process: _Process, limits: LimitsConfig, header: Mapping[str, Any]) -> None:
        self._process, self._limits = process, limits
        self.layout, self.trainable_layout = child.layout_of(header["layout"]), child.layout_of(header["trainable"])
        self.tied = {str(name): str(of) for name, of in header["tied"].items()}
        self.remarks = tuple(map(str, header["remarks"]))
        given = header["local_frozen"]
        self.local_frozen = None if given is None else Resource.FromString(bytes.fromhex(given))

    @contextmanager
    def first(self, path: str = "") -> Iterator[fl.ModelState]:
        """The result of `TaskModel.first`."""
        reply = self._process.ask("making the first model", self._limits.task_load_s, {"do": "first", "path": path})

        def read() -> fl.ModelState:
            tensors, frozen = reply.bundle(self.layout), reply.bundle(child.layout_of(reply.header["frozen"]))
            trainable = {entry.name: tensors[entry.name] for entry in self.layout.entries if entry.trainable}
            buffers = {entry.name: tensors[entry.name] for entry in self.layout.entries if not entry.trainable}
            return fl.ModelState(trainable, buffers, frozen)

        yield checked(str(self._process.pid), read)

    def release(self) -> None:
        """Nothing: the process keeps its memory."""

    def evaluate(self, values: fl.ModelState, *, estimate: bool = False) -> dict[str, float]:
        """The task's metrics of a model with these values on its held-out examples.

        estimate: compute its running statistics anew first. Raises TaskError, and EvaluationLeft after `leave`.
        """
        more = {"estimate": True} if estimate else {}
        reply = self._with_values("evaluate", "the evaluation", self._limits.evaluation_s, values, **more)
        return checked(str(self._process.pid), lambda: _metrics(reply.header["metrics"]))

    def names(self, values: fl.ModelState) -> list[str] | None:
        """Names of its metrics, from one batch; None without held-out examples. Raises TaskError."""
        reply = self._with_values("names", "the first batch of an evaluation", self._limits.task_load_s, values)
        found = reply.header["names"]
        return None if found is None else checked(str(self._process.pid), lambda: [str(name) for name in found])

    def _with_values(self, do: str, what: str, seconds: float, values: fl.ModelState, **more: bool) -> _Reply:
        frozen = Layout.of(values.frozen)
        sent = packed({**values.trainable, **values.buffers}, self.layout)
        bundles = [memoryview(sent), memoryview(packed(values.frozen, frozen))]
        return self._process.ask(what, seconds, {"do": do, "frozen_layout": child.layout_text(frozen), **more}, bundles)

    def leave(self, why: str) -> None:
        """End the evaluation under way, and with it the process."""
        self._process.end(why)


def _metrics(found: Mapping[str, str]) -> dict[str, float]:
    return {str(name): float.fromhex(value) for name, value in found.items()}
