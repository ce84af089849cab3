"""The examples of clients in lockstep in one tensor, on their device, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_client.training.data import LocalTask
from fl_ops.errors import Refused
from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.engines.held import free_bytes
from fl_tasks import Examples
from fl_tasks.batches import Finish, Rows, finish_of
from fl_tasks.data.examples import Augmentation


@dataclass(frozen=True, slots=True)
class Pooled:
    """The examples of a group."""

    inputs: Tensor
    """The inputs as they are kept, [examples, ...], on the device."""
    targets: Tensor
    rows: Sequence[Rows]
    """Where each client's examples are."""
    finish: Finish | None
    """The last step of a batch of local steps."""
    prepare: Finish | None
    """That of a batch of the whole local set."""
    stays: bool
    """Inputs and targets are the same tensors for all groups."""

    @property
    def draw(self) -> Callable[[Tensor], tuple[Tensor, ...]] | None:
        """See `algorithms.batched.batches.Planned.draw`."""
        return None if self.finish is None or self.finish.augment is None else self.finish.augment.draw


class Pool:
    """Finds the clients' examples. On a GPU those of all clients stay there, on a CPU they are not copied to stay."""

    def __init__(self, clients: Mapping[str, LocalTask], device: torch.device) -> None:
        self._clients, self._device = clients, device
        self._whole: Examples | None = None
        self._rows: dict[str, Rows] = {}
        self._joins_all = device.type != "cpu"
        if isinstance(clients, SimulatedClients) and clients.whole is not None:
            self._whole, self._joins_all = _moved(clients.whole, device), False

    def of(self, group: Sequence[str]) -> Pooled | None:
        """A group's examples; None unless all are Examples with the same last steps, of the same code and shapes."""
        if self._joins_all:
            self._joins_all = False
            if (joined := _joined({client: self._clients[client] for client in self._clients})) is not None:
                self._whole, self._rows = _moved(joined[0], self._device), joined[1]
        if self._whole is not None:
            rows = [self._rows_of(client) for client in group]
            return _pooled(self._whole, rows, stays=True) if all(map(len, rows)) else None
        if self._device.type != "cpu":
            return None
        joined = _joined({client: self._clients[client] for client in group})
        return None if joined is None else _pooled(joined[0], [joined[1][client] for client in group], stays=False)

    def _rows_of(self, client: str) -> Rows:
        if client not in self._rows and isinstance(self._clients, SimulatedClients):
            self._rows[client] = self._clients.rows(client).numpy()
        return self._rows[client]


def check_room(device: torch.device, wanted: Mapping[str, int]) -> None:
    """Raises Refused if a GPU has no room for all that is wanted: bytes by what they are."""
    needed, free = sum(wanted.values()), free_bytes(device)
    if device.type != "cpu" and needed > free:
        parts = " and ".join(f"{what}, {size / 2**30:.1f} GiB" for what, size in wanted.items() if size)
        raise Refused(
            f"--device {device}: expected room for {parts}, got {free / 2**30:.1f} GiB free: end what else uses the "
            "GPU, take one with more memory, or --engine workers"
        )


def _moved(examples: Examples, device: torch.device) -> Examples:
    """The examples on the device. Raises Refused if it has no room for them."""
    check_room(device, {"the examples of all clients": examples.inputs.nbytes + examples.targets.nbytes})
    return examples.to(device)


def _joined(clients: Mapping[str, LocalTask]) -> tuple[Examples, dict[str, Rows]] | None:
    """The clients' examples as one set, and where each one's are in it."""
    locals_ = [*clients.values()]
    first, parts = locals_[0], [local.train for local in locals_ if isinstance(local.train, Examples)]
    if len(parts) < len(locals_) or any(_kind(part) != _kind(parts[0]) or not len(part) for part in parts):
        return None
    code = first.name, first.task, first.fingerprint
    if any((local.name, local.task, local.fingerprint) != code for local in locals_):
        return None
    whole = replace(
        parts[0], inputs=torch.cat([part.inputs for part in parts]), targets=torch.cat([part.targets for part in parts])
    )
    rows = torch.arange(len(whole)).split([len(part) for part in parts])
    return whole, {client: own.numpy() for client, own in zip(clients, rows, strict=True)}


def _kind(examples: Examples) -> tuple[object, ...]:
    tensors = ((tensor.dtype, tensor.shape[1:], tensor.device) for tensor in (examples.inputs, examples.targets))
    return examples.augment, examples.prepare, *tensors


def _pooled(whole: Examples, rows: Sequence[Rows], *, stays: bool) -> Pooled | None:
    """None for an augmentation that draws its numbers while it changes a batch, and so client by client."""
    if whole.augment is not None and not isinstance(whole.augment, Augmentation):
        return None
    prepare = None if whole.prepare is None else Finish(whole.prepare, None)
    return Pooled(whole.inputs, whole.targets, rows, finish_of(whole), prepare, stays)


class OnDevice(Mapping[str, LocalTask]):
    """Clients whose data is on a device. It stays there after the client's first work."""

    def __init__(self, clients: Mapping[str, LocalTask], device: torch.device) -> None:
        self._clients, self._device = clients, device
        self._moved: dict[str, LocalTask] = {}

    def __getitem__(self, client: str) -> LocalTask:
        if client not in self._moved:
            local = self._clients[client]
            train, held_out = local.train.to(self._device), local.held_out.to(self._device)
            self._moved[client] = replace(local, train=train, held_out=held_out, device=self._device)
        return self._moved[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)
