"""What the process of a task does: loads the task, makes its model, evaluates; and the messages with the coordinator.

A message is a header in JSON, and the bytes of bundles.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

import algorithms as fl
from algorithms.outside_code import described, is_of_the_machine
from fl_common.allocator import give_back_freed_memory
from fl_server.aggregation.bundles import CPU, packed
from fl_server.aggregation.evaluation import EvaluatedModel
from fl_server.aggregation.task_model import with_own
from fl_server.errors import InvalidInput
from fl_tasks import Task, TaskError, fingerprint, load_task
from fl_tasks.errors import is_own_fault
from fl_tasks.metrics import declared_directions
from fl_tasks.own_loop import own_loop
from fl_tasks.summed_metrics import PlainSum, Pool
from protos.buffers import zeros
from protos.codec import Layout, unpack
from protos.fl.v1.tensor_pb2 import Manifest

MAX_HEADER = 64 << 20
"""Bytes of a header. It has the names and shapes of all tensors, or metrics."""
_LENGTH = struct.Struct("<I")


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
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, ends))
    if length > MAX_HEADER:
        raise Closed
    try:
        header = json.loads(bytes(_read(connection, length, ends)))
    except ValueError as error:
        raise Closed from error
    if not isinstance(header, dict):
        raise Closed
    return header


def receive_bundle(connection: socket.socket, size: int, ends: float | None = None) -> memoryview:
    """Receive a bundle of so many bytes. Raises as `receive`."""
    return _read(connection, size, ends)


def _read(connection: socket.socket, size: int, ends: float | None) -> memoryview:
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


MAX_BUNDLE = 1 << 50
"""Bytes of a bundle; the coordinator's own limit for updates is checked when the run is created."""


T = TypeVar("T")
Reply = tuple[Mapping[str, object], list[memoryview]]


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
