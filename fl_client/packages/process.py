"""The process in which a package's task runs, which `fl_client.packages.landlock` starts for the daemon.

It gets the daemon's settings and the folder of the package, limits itself, loads the task with its data, and answers
requests until the daemon closes the connection. A message is a header in JSON and the bytes of its parts. Nothing is
pickled, and the daemon believes no number that comes from here: see `fl_client.packages.trainer`.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from algorithms.base import Memory
from fl_client.connection.bundles.expected import Bundle, ResourceKey, key_of, kind_of
from fl_client.errors import WorkFailed
from fl_client.packages.sandbox import limit
from fl_client.settings import device as devices
from fl_client.settings.config import ClientConfig
from fl_client.storage.state import StateDir
from fl_client.training.data import load_local_task
from fl_client.training.results import Interrupted, task_failures
from fl_client.training.trainer import AnyAssignment, Trainer
from protos.codec import Layout, pack, unpack
from protos.fl.v1 import tensor_pb2, training_pb2

MOST_BYTES = 1 << 40
"""Most bytes of all parts of a message."""
MOST_HEADER = 64 << 20
_LENGTH = struct.Struct("<I")
Part = bytes | bytearray | memoryview


class Closed(Exception):
    """The other process has ended, or sends what is no message."""


def send(connection: socket.socket, header: Mapping[str, Any], parts: Sequence[Part] = ()) -> None:
    """Send a message. Raises OSError."""
    text = json.dumps({**header, "sizes": [memoryview(part).nbytes for part in parts]}).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket, most: int = MOST_BYTES) -> tuple[dict[str, Any], list[bytearray]]:
    """Receive a message of at most so many bytes of parts. Raises Closed."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MOST_HEADER:
        raise Closed("a header that is too long")
    try:
        header = json.loads(_exactly(connection, length))
        sizes = [int(size) for size in header["sizes"]]
    except (ValueError, TypeError, KeyError) as error:
        raise Closed("a header that is no JSON with sizes") from error
    if min(sizes, default=0) < 0 or sum(sizes) > most:
        raise Closed(f"parts of {sum(sizes)} bytes, more than {most}")
    return header, [_exactly(connection, size) for size in sizes]


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        try:
            count = connection.recv_into(view[done:])
        except OSError as error:
            raise Closed(str(error)) from error
        if not count:
            raise Closed("the connection was closed")
        done += count
    return data


def packed(tensors: Mapping[str, Tensor]) -> tuple[str, Part]:
    """Named tensors as a manifest in hex, and bytes."""
    layout = Layout.of(tensors)
    return layout.to_manifest().SerializeToString().hex(), pack(tensors, layout)


def unpacked(manifest: str, data: Part) -> dict[str, Tensor]:
    """The tensors of `packed`. Raises LayoutError, ValueError and DecodeError for anything else."""
    return unpack(data, Layout.from_manifest(tensor_pb2.Manifest.FromString(bytes.fromhex(manifest)), len(data)))


def flat(memory: Memory) -> dict[str, Tensor]:
    """A client state as named tensors."""
    return {f"{symbol}/{name}": tensor for symbol, named in memory.items() for name, tensor in named.items()}


def nested(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The client state of `flat`."""
    memory: dict[str, dict[str, Tensor]] = {}
    for place, tensor in tensors.items():
        symbol, _, name = place.partition("/")
        memory.setdefault(symbol, {})[name] = tensor
    return memory


class Hosted:
    """The task of this process, with its data and its model."""

    def __init__(self, connection: socket.socket, order: Mapping[str, Any]) -> None:
        """Load the task. Raises what the task's code raises."""
        self._connection = connection
        sys.path.append(order["folder"])  # behind all others: a package replaces no module of this installation
        config = ClientConfig.model_validate(order["config"])
        torch.set_num_threads(config.threads)
        device = devices.choose(config.device)
        local = load_local_task(config, StateDir(config.state_dir), device, order["number"])
        compute = devices.Compute(config.precision, config.memory_format)
        self._trainer = Trainer(local, compute=compute)
        self.offer = replace(local, frozen=self._trainer.own_frozen()).offer()

    def answer(self, request: Mapping[str, Any], parts: Sequence[Part]) -> tuple[dict[str, Any], list[Part]]:
        """The reply to a request."""
        kind = training_pb2.Assignment if request["training"] else training_pb2.EvaluationAssignment
        assignment: Any = kind.FromString(bytes.fromhex(request["assignment"]))
        if request["do"] == "layouts":
            return self._layouts(assignment)
        layouts, given = self._trainer.layouts(assignment), list(zip(request["parts"], parts, strict=True))
        state = next((nested(unpacked(manifest, part)) for (_, manifest), part in given if manifest), None)
        kinds = [(key_of(key), part) for (key, manifest), part in given if not manifest]
        bundles = {key: _bundle(key, layouts, part) for key, part in kinds}
        if request["do"] == "train":
            return self._train(assignment, bundles, state)
        measure = self._trainer.evaluate if request["do"] == "evaluate" else self._trainer.measure_received
        return asdict(measure(assignment, bundles, state)), []

    def _layouts(self, assignment: AnyAssignment) -> tuple[dict[str, Any], list[Part]]:
        layouts = self._trainer.layouts(assignment)
        return {"layouts": [[kind, it.to_manifest().SerializeToString().hex()] for kind, it in layouts.items()]}, []

    def _train(
        self, assignment: training_pb2.Assignment, bundles: Mapping[ResourceKey, Bundle], state: Memory | None
    ) -> tuple[dict[str, Any], list[Part]]:
        result = self._trainer.train(assignment, bundles, state, self._on_step)
        header: dict[str, Any] = {"header": result.update.header.SerializeToString().hex(), "states": []}
        parts: list[Part] = [b"".join(result.update.pieces)]
        for memory in () if result.next_state is None else (result.next_state.at_one, result.next_state.at_zero):
            manifest, data = packed(flat(memory))
            header["states"].append(manifest)
            parts.append(data)
        return header, parts

    def _on_step(self, step: int, steps: int) -> None:
        send(self._connection, {"step": [step, steps]})
        if receive(self._connection)[0].get("stop"):
            raise Interrupted


def _bundle(key: ResourceKey, layouts: Mapping[Any, Layout], data: Part) -> Bundle:
    layout = layouts[kind_of(key)]
    return Bundle(layout, unpack(data, layout))


def _end_with(daemon: int) -> None:
    """End this process when the daemon has been killed, also while the task's code hangs."""
    while os.getppid() == daemon:
        time.sleep(1.0)
    os._exit(0)


def serve() -> None:
    """Serve until the daemon closes the connection."""
    try:
        _serve()
    except Closed:
        os._exit(0)


def _serve() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    Thread(target=_end_with, args=(os.getppid(),), name="daemon", daemon=True).start()
    order, _ = receive(connection)
    limit(order["memory_bytes"], order["file_bytes"], order["open_files"])
    try:
        with task_failures():
            hosted = Hosted(connection, order)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the daemon is told
        send(connection, {"failed": str(error)})
        return
    send(connection, {"offer": hosted.offer.SerializeToString().hex()})
    while True:
        request, parts = receive(connection)
        try:
            header, results = hosted.answer(request, parts)
        except Interrupted:
            header, results = {"stopped": True}, []
        except WorkFailed as error:
            header, results = {"failed": str(error), "reason": int(error.reason)}, []
        send(connection, header, results)
