"""Client states: SCAFFOLD's c_i, FedDyn's h_i. One file for each run, and the next state of a round in progress.

A state belongs to the update that created it: to its run, round and digest, and to the epoch that it was made in.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import structlog
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from algorithms import tree
from algorithms.base import Algorithm, ClientContext, ClientUpdate, Memory, Tensors
from fl_client.storage import disk
from protos.chunks import Buffer
from protos.codec import Layout, LayoutError, pieces_of, unpack
from protos.digests import digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2

_DIGEST_BYTES = 32
_LENGTHS = struct.Struct("<QQ")


class Damaged(ValueError):
    """Bytes that `encode` did not write: truncated, changed, or of another program."""


def encode(metadata: bytes, memories: Sequence[Memory]) -> list[Buffer]:
    """The bytes of memories, in pieces that may share the tensors' memory. Tensors may be on any device."""
    tensors = {
        f"{number}/{symbol}/{name}": tensor
        for number, memory in enumerate(memories)
        for symbol, named in memory.items()
        for name, tensor in named.items()
    }
    layout = Layout.of(tensors)
    manifest = layout.to_manifest().SerializeToString()
    pieces: list[Buffer] = [
        _LENGTHS.pack(len(metadata), len(manifest)),
        metadata,
        manifest,
        *pieces_of(tensors, layout),
    ]
    return [digest_of(*pieces), *pieces]


def read_metadata(file: BufferedReader) -> bytes:
    """The metadata alone, from the file's position, without a check of the digest. Raises Damaged."""
    return _head(file)[2]


def decode(file: BufferedReader, count: int) -> tuple[bytes, list[Memory]]:
    """Metadata and `count` memories, from the file's position to its end. Tensors are on the CPU.

    Raises:
        Damaged: `encode` did not write these bytes.
    """
    digest, lengths, metadata, manifest_bytes = _head(file)
    manifest = _exactly(file, manifest_bytes)
    data = _exactly(file, _left(file))
    if digest_of(lengths, metadata, manifest, data) != digest:
        raise Damaged(f"expected bytes of digest {digest.hex()[:16]}, got others")
    try:
        layout = Layout.from_manifest(tensor_pb2.Manifest.FromString(bytes(manifest)), len(data))
        return metadata, _memories(unpack(data, layout), count)
    except (DecodeError, LayoutError, ValueError, IndexError) as error:
        raise Damaged(f"client states: {error}") from error


def _memories(tensors: Tensors, count: int) -> list[Memory]:
    memories: list[dict[str, Tensors]] = [{} for _ in range(count)]
    for place, tensor in tensors.items():
        number, symbol, name = place.split("/", 2)
        memories[int(number)].setdefault(symbol, {})[name] = tensor
    return list(memories)


def _head(file: BufferedReader) -> tuple[bytes, bytes, bytes, int]:
    """Digest, lengths, metadata, and the size of the manifest that follows."""
    digest = bytes(_exactly(file, _DIGEST_BYTES))
    lengths = bytes(_exactly(file, _LENGTHS.size))
    metadata_bytes, manifest_bytes = _LENGTHS.unpack(lengths)
    return digest, lengths, bytes(_exactly(file, metadata_bytes)), manifest_bytes


def _exactly(file: BufferedReader, size: int) -> bytearray:
    """The next `size` bytes. No memory is taken for bytes that the file does not have."""
    if size > (left := _left(file)):
        raise Damaged(f"expected {size} bytes more, got {left}")
    data = bytearray(size)
    file.readinto(data)
    return data


def _left(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size - file.tell()


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class NextState:
    """The client state after a round whose outcome is unknown.

    The next state of every method is affine in the factor c by which the coordinator clips the delta. So the states
    for c = 1 and c = 0 determine all others.
    """

    at_one: Memory
    """The state for c = 1: the delta counts as it was sent."""
    at_zero: Memory
    """The state for c = 0, only for the symbols that depend on the delta."""

    @staticmethod
    def of(algorithm: Algorithm, context: ClientContext, update: ClientUpdate) -> NextState:
        """The method's next state after this update, which was computed from `context`."""
        at_one = algorithm.next_client_state(context, update)
        return NextState.of_both(at_one, algorithm.next_client_state(context, update.admitted(0.0)))

    @staticmethod
    def of_both(at_one: Memory, at_zero: Memory) -> NextState:
        """The next state from the whole states for c = 1 and c = 0."""
        return NextState(at_one, {symbol: it for symbol, it in at_zero.items() if not same(it, at_one[symbol])})

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors of both."""
        memories = (self.at_one, self.at_zero)
        return sum(it.nbytes for memory in memories for tensors in memory.values() for it in tensors.values())

    def at(self, clip_factor: float) -> Memory:
        """The state of a round that counted with this factor. A factor of 1 returns the tensors of `at_one`."""
        if clip_factor == 1.0:
            return self.at_one
        return {
            symbol: tree.map(lambda a, b: _blend(a, b, clip_factor), self.at_zero[symbol], tensors)
            if symbol in self.at_zero
            else tensors
            for symbol, tensors in self.at_one.items()
        }


@dataclass(frozen=True, slots=True)
class StoredState:
    """The state of this device in a run, after a round that counted."""

    created_by: training_pb2.Outcome
    """Outcome of the update that created it. Its state_epoch is the one that the state was made in."""
    memory: Memory


class ClientStateStore:
    """Files of client states, each replaced by one rename."""

    def __init__(self, folder: Path) -> None:
        self._folder = disk.made(folder)

    def put(self, state: StoredState) -> None:
        """Write a state in place of the run's earlier one, durable against a power cut. Raises OSError."""
        data = encode(state.created_by.SerializeToString(), [state.memory])
        disk.write_whole(self._path(state.created_by.key.run_id), data, durable=True)

    def find(self, run_id: str) -> StoredState | None:
        """The run's state. None if there is none, or if its file is unreadable, which is logged."""
        path = self._path(run_id)
        try:
            with path.open("rb") as file:
                metadata, (memory,) = decode(file, 1)
            return StoredState(training_pb2.Outcome.FromString(metadata), memory)
        except FileNotFoundError:
            return None
        except (OSError, DecodeError, Damaged) as error:
            log.error("state_unreadable", run=run_id, file=path.name, reason=str(error), todo="it counts as lost")
            return None

    def created_by(self, run_id: str) -> training_pb2.Outcome | None:
        """Outcome of the update that created the run's state, read without the state."""
        return _created_by(self._path(run_id))

    def drop(self, run_id: str) -> None:
        """Remove a run's state, if there is one."""
        self._path(run_id).unlink(missing_ok=True)

    def data_of(self, run_id: str) -> str:
        """Name of the data that the run's files are made with; empty for data without a name, and before the first."""
        try:
            return self._path(run_id).with_suffix(".data").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def set_data(self, run_id: str, name: str) -> None:
        """Keep the name of the data that the run's files are made with from now on. Raises OSError."""
        path = self._path(run_id).with_suffix(".data")
        if name:
            disk.write_whole(path, [name.encode()], durable=True)
        else:
            path.unlink(missing_ok=True)

    def held(self) -> list[pb.HeldState]:
        """The runs with a state, and the epoch that it was made in."""
        read = (_created_by(path) for path in sorted(self._folder.glob("*.state")))
        return [pb.HeldState(run_id=it.key.run_id, state_epoch=it.state_epoch) for it in read if it is not None]

    def size_bytes(self) -> int:
        """Bytes on disk of all states."""
        return sum(path.stat().st_size for path in self._folder.glob("*.state"))

    def _path(self, run_id: str) -> Path:
        # The run's id comes from the wire, so it is not trusted as a file name.
        return self._folder / f"{digest_of(run_id.encode()).hex()[:32]}.state"


def _created_by(path: Path) -> training_pb2.Outcome | None:
    try:
        with path.open("rb") as file:
            return training_pb2.Outcome.FromString(read_metadata(file))
    except (OSError, DecodeError, Damaged):
        return None


def _blend(at_zero: Tensor, at_one: Tensor, factor: float) -> Tensor:
    """at_zero + factor * (at_one - at_zero) in float64, rounded once."""
    return torch.lerp(at_zero.double(), at_one.double(), factor).to(at_one.dtype)


def same(a: Tensors, b: Tensors) -> bool:
    """Whether both have the same tensors."""
    return a is b or (a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items()))
