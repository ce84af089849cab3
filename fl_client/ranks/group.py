"""The processes that train together, as each of them sees them: joining, sums, and work that rank 0 gives the others.

Nothing is pickled: the head of some work is JSON, its tensors are broadcast as bytes.
"""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's types lack it

from algorithms.base import Memory
from fl_client.connection.bundles.expected import Bundle, Layouts, ResourceKey, key_of, key_text, kind_of
from protos.fl.v1 import training_pb2

Bundles = Mapping[ResourceKey, Bundle]

LONGEST_WAIT = timedelta(days=7)
"""The longest wait for the next work. A process that ends is noticed at once, by its closed connection."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Group:
    """See `fl_client.training.trainer.Together`: the default group of torch.distributed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """See Processes."""
        for sent in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            sent.wait()

    def working(
        self, assignment: training_pb2.Assignment, bundles: Bundles, state: Memory | None
    ) -> AbstractContextManager[None]:
        """See Together. A rank that is not the first has got the work already."""
        del assignment, bundles, state
        return nullcontext()


Named = Mapping[str, Tensor]
GivenWork = tuple[training_pb2.Assignment, Mapping[ResourceKey, Named], Memory | None]
"""What a rank needs to train with the others: an assignment, the tensors of its bundles, and the client state."""


def join(store: TCPStore, group: Group, device: torch.device) -> dist.ProcessGroup:
    """Join the default group; returns the one for messages. Everything stays on this machine."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size)
    messages: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    return messages


def give(
    messages: dist.ProcessGroup, assignment: training_pb2.Assignment, bundles: Bundles, state: Memory | None
) -> None:
    """Give all other ranks some work."""
    parts: list[tuple[list[Any] | str, Named]] = [(key_text(key), bundle.tensors) for key, bundle in bundles.items()]
    parts += (state or {}).items()
    head = {
        "assignment": base64.b64encode(assignment.SerializeToString()).decode(),
        "stateless": state is None,
        "parts": [
            [name, tensor, str(it.dtype).removeprefix("torch."), list(it.shape)]
            for name, tensors in parts
            for tensor, it in tensors.items()
        ],
    }
    text = json.dumps(head).encode()
    dist.broadcast(torch.tensor([len(text)]), 0, messages)
    dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0, messages)
    for _, tensors in parts:
        for tensor in tensors.values():
            _broadcast(tensor.detach().cpu().contiguous(), messages)


def take(messages: dist.ProcessGroup) -> GivenWork:
    """The next work that rank 0 gives; it may take long to come."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, 0, messages)
    text = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, 0, messages)
    head: dict[str, Any] = json.loads(text.numpy().tobytes())
    bundles: dict[ResourceKey, dict[str, Tensor]] = {}
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor, dtype, shape in head["parts"]:
        value = torch.empty(shape, dtype=_DTYPES[dtype])
        _broadcast(value, messages)
        part = state.setdefault(name, {}) if isinstance(name, str) else bundles.setdefault(key_of(name), {})
        part[tensor] = value
    assignment = training_pb2.Assignment.FromString(base64.b64decode(head["assignment"]))
    return assignment, bundles, None if head["stateless"] else state


def bundles_of(given: Mapping[ResourceKey, Named], layouts: Layouts) -> dict[ResourceKey, Bundle]:
    """The bundles of some work, with the layouts of this process's own model."""
    return {key: Bundle(layouts[kind_of(key)], dict(tensors)) for key, tensors in given.items()}


def _broadcast(tensor: Tensor, messages: dist.ProcessGroup) -> None:
    if tensor.numel():
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, messages)
