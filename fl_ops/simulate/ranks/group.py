"""The processes that torchrun started: joins them, and carries messages between rank 0 and the others.

A message is a small head as JSON and any number of buffers. The backend is gloo, on GPU machines too: what is sent are
files and bundles in the memory of the host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fl_ops.errors import Refused, UsageError
from protos.chunks import Buffer

_LONGEST_WAIT = timedelta(days=7)
"""The longest wait for a message. A rank that ends is noticed at once, by its closed connection."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Head = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sent to another."""

    head: Head
    buffers: Sequence[bytearray]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The group, as one of its processes sees it."""

    rank: int
    size: int

    @property
    def others(self) -> range:
        """All ranks but rank 0."""
        return range(1, self.size)

    def send(self, to: int, head: Head, buffers: Sequence[Buffer] = ()) -> None:
        """Send a message to one rank. Raises Refused if that rank has ended."""
        text = json.dumps([head, [len(each) for each in buffers]]).encode()
        with _lost_ranks():
            dist.send(torch.tensor([len(text)]), to)
            for each in (text, *filter(len, buffers)):
                dist.send(_tensor(each), to)

    def receive(self, source: int) -> Message:
        """The next message of a rank. Raises Refused if that rank has ended."""
        with _lost_ranks():
            length = torch.empty(1, dtype=torch.int64)
            dist.recv(length, source)
            head, sizes = json.loads(_received(int(length), source))
            return Message(head, [_received(size, source) for size in sizes])

    def broadcast(self, data: Buffer | None, size: int) -> bytearray:
        """Give all ranks the buffer of rank 0, of `size` bytes. Other ranks give None."""
        into = bytearray(size) if data is None else bytearray(data)
        if size:
            with _lost_ranks():
                dist.broadcast(_tensor(into), 0)
        return into


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the group, until the context ends. Raises UsageError if torchrun did not start this process."""
    if missing := [name for name in _VARIABLES if name not in os.environ]:
        raise UsageError(
            f"--distributed: expected the environment of torchrun, without {', '.join(missing)} here. Start it with "
            "torchrun --nproc-per-node 2 -m fl_ops simulate CONFIG.TOML --distributed"
        )
    with _lost_ranks():
        dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@contextmanager
def _lost_ranks() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise Refused(f"another rank of this run ended or cannot be reached: see its output ({error})") from error


def _received(size: int, source: int) -> bytearray:
    data = bytearray(size)
    if size:
        dist.recv(_tensor(data), source)
    return data


def _tensor(data: Buffer) -> Tensor:
    """The bytes as a tensor. Read-only memory is copied, because torch warns of it."""
    view = memoryview(data)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
