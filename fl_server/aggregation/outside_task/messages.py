"""The messages between the coordinator and the process of a task: a header in JSON, and the bytes of bundles."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from protos.buffers import zeros
from protos.codec import Layout
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
