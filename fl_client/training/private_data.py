"""A device's data as private steps need it: single examples by their numbers, and a digest of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from algorithms.batches import examples_of, leaves, map_leaves
from fl_client.errors import WorkFailed, unsupported
from fl_client.training.results import task_failures
from fl_tasks.data.batched import Batched
from fl_tasks.data.examples import Examples
from fl_tasks.data.forms import Data
from fl_tasks.data.samples import Samples


@dataclass(frozen=True, slots=True)
class PrivateData:
    """What the result of private steps depends on beside the assignment."""

    examples: int
    """n."""
    device: str
    """The kind of the device that the batches are on."""
    digest: bytes


def check_data(data: Data) -> Examples | Samples:
    """The data, if each example of it can be drawn by itself. Raises WorkFailed otherwise."""
    if isinstance(data, Batched):
        raise not_private(
            "expected Examples or Samples, from which each example is drawn by itself, got Batched, whose batches the"
            " task makes of several examples: return Samples(dataset) with __len__ and __getitem__"
        )
    return data


def private_data(data: Data) -> PrivateData:
    """The data with a digest of every example. Samples are read once for it, without the seeds of a run.

    Raises WorkFailed as `check_data`, and for an error in the code of the data.
    """
    hasher, known = blake3(), check_data(data)
    if isinstance(known, Examples):
        for tensor in (known.inputs, known.targets):
            add_tensor(hasher, tensor)
        return PrivateData(len(known), known.inputs.device.type, hasher.digest())
    with task_failures():
        for batch in known.read(([position] for position in range(len(known))), 0):
            _add_example(hasher, batch)
    return PrivateData(len(known), known.device.type, hasher.digest())


def _add_example(hasher: blake3, batch: Any) -> None:
    """Add a batch that was made of one example."""
    try:
        count = examples_of(batch)
    except ValueError as error:
        raise not_private(str(error)) from None
    if count != 1:
        raise not_private(
            f"expected a batch of one example from one record, got {count}: a record's gradient is clipped as a whole"
        )
    add(hasher, repr(map_leaves(lambda _: 0, batch)).encode())
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            add_tensor(hasher, leaf)
        elif leaf is None or isinstance(leaf, str | bytes | int | float):
            add(hasher, repr(leaf).encode())
        else:
            raise not_private(f"expected batches of tensors, texts and numbers, got {type(leaf).__name__} in one")


def add(hasher: blake3, part: bytes) -> None:
    """Add bytes with their number, so that no other parts have the same digest."""
    hasher.update(len(part).to_bytes(8, "little"))
    hasher.update(part)


def add_tensor(hasher: blake3, tensor: Tensor) -> None:
    """Add a tensor with its type and shape."""
    add(hasher, f"{tensor.dtype} {list(tensor.shape)}".encode())
    hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def not_private(message: str) -> WorkFailed:
    """The failure of an assignment with privacy that this device refuses."""
    return unsupported(f"privacy: {message}")
