"""A small federation with a network, for tests of clients in lockstep: sizes differ, and last batches are short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import algorithms as fl
from algorithms import tree
from algorithms.batched.client import answer_together
from algorithms.batched.members import Members
from algorithms.batched.modules import RandomStream
from algorithms.batched.training import Training

CPU = torch.device("cpu")


def small_cnn() -> nn.Module:
    """Two convolutions, one with stride and padding, and a linear layer, for [n, 1, 6, 6] and 3 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU(), nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


@dataclass(frozen=True)
class Small:
    """A client with images of its own."""

    name: str
    inputs: Tensor
    targets: Tensor
    epochs: int = 2
    batch_size: int = 4
    augment: Callable[[Tensor], Tensor] = lambda images: images
    loss: Callable[[Any, Any], Tensor] = functional.cross_entropy

    @property
    def info(self) -> fl.UpdateInfo:
        """Examples and steps."""
        return fl.UpdateInfo(self.name, len(self.inputs), self.data().steps)

    def data(self) -> fl.LocalData:
        """Batches in order, the last one of an epoch smaller, augmented when they are read."""
        whole = list(zip(self.inputs.split(self.batch_size), self.targets.split(self.batch_size), strict=True))
        steps = ((self.augment(inputs), targets) for _ in range(self.epochs) for inputs, targets in whole)
        count = len(whole) * self.epochs
        return fl.LocalData(steps, whole, self.loss, steps=count, epoch_steps=len(whole))


def clients(dtype: torch.dtype = torch.float64, **changes: Any) -> list[Small]:
    """Four clients of 9, 4, 14 and 6 images: 6, 2, 8 and 4 steps, three of them with short batches."""
    random = torch.Generator().manual_seed(5)
    return [
        Small(
            f"client-{i}",
            torch.randn(size, 1, 6, 6, generator=random, dtype=torch.float64).to(dtype),
            torch.randint(3, (size,), generator=random),
            **changes,
        )
        for i, size in enumerate((9, 4, 14, 6))
    ]


@dataclass
class Run:
    """A run of a method, with the clients one after the other or in lockstep."""

    algorithm: fl.Algorithm
    model: nn.Module
    clients: Sequence[Small]
    settings: fl.LocalSettings
    training: Training | None = None
    """None: one after the other."""
    kept: dict[str, fl.Memory] = field(default_factory=dict)
    updates: list[fl.ClientUpdate] = field(default_factory=list)
    """Of the latest exchange."""

    def __post_init__(self) -> None:
        values = fl.read_state(self.model)
        self.state, self.buffers, self.frozen = self.algorithm.init(values.trainable), values.buffers, values.frozen

    def round(self, number: int) -> None:
        """One round with all clients."""
        infos = [client.info for client in self.clients]
        info = fl.RoundInfo(
            number, self.settings.learning_rate, rounds=4, population=len(infos),
            population_examples=sum(each.num_examples for each in infos), cohort_size=len(infos),
        )  # fmt: skip
        sums: dict[str, fl.Tensors] = {}
        for exchange, parts in enumerate(self.algorithm.exchanges):
            contexts = [self._context(client, parts.direction(self.state, sums), info) for client in self.clients]
            self.updates = self._answer([fl.Work(self.algorithm, one, self.settings, exchange) for one in contexts])
            sent = [
                (replace(each, num_steps=update.steps), update.payloads)
                for each, update in zip(infos, self.updates, strict=True)
            ]
            sums |= fl.sum_exchange(parts, sent, info)
        self.state = self.algorithm.server_step(self.state, sums, info)
        if self.buffers:
            self.buffers = fl.average_buffers([each.buffers for each in self.updates], self.algorithm.weights(infos))
        if self.algorithm.keeps_client_state:
            for client, context, update in zip(self.clients, contexts, self.updates, strict=True):
                self.kept[client.name] = self.algorithm.next_client_state(context, update)

    def _context(self, client: Small, direction: fl.Tensors | None, info: fl.RoundInfo) -> fl.ClientContext:
        known = self.kept.get(client.name) or self.algorithm.client_init(self.state.x)
        return fl.ClientContext(direction, known, fl.omega(self.algorithm.objective, client.info, info))

    def _answer(self, works: list[fl.Work]) -> list[fl.ClientUpdate]:
        fl.load_state(self.model, fl.ModelState(self.state.x, self.buffers, self.frozen))
        if self.training is not None:
            return self._answer_together(works, self.training)
        updates = []
        for number, (client, work) in enumerate(zip(self.clients, works, strict=True)):
            fl.load_state(self.model, fl.ModelState(self.state.x, self.buffers, self.frozen))
            torch.manual_seed(100 + number)
            updates.append(fl.answer(self.model, client.data(), work))
        return updates

    def _answer_together(self, works: list[fl.Work], training: Training) -> list[fl.ClientUpdate]:
        data = [client.data() for client in self.clients]
        order = sorted(range(len(data)), key=lambda i: -data[i].steps)
        streams = [RandomStream(CPU, 100 + i) for i in order]
        members = Members.drawn([data[i] for i in order], [works[i] for i in order], streams)
        found = answer_together(self.model, members, training)
        return [found.of_client(order.index(i)) for i in range(len(data))]

    def values(self) -> dict[str, fl.Tensors]:
        """All numbers of the run: model, server memory, client states, and the latest updates, by their names."""
        parts: dict[str, fl.Tensors] = {"x": self.state.x, "buffers": self.buffers}
        parts |= {f"memory {symbol}": tensors for symbol, tensors in self.state.memory.items()}
        for client, memory in self.kept.items():
            parts |= {f"{client} {symbol}": tensors for symbol, tensors in memory.items()}
        for number, update in enumerate(self.updates):
            loss = torch.tensor([update.loss or 0.0, *(each["loss"] for each in update.epochs)])
            parts |= {f"update {number} loss": {"loss": loss}, f"update {number} buffers": update.buffers}
            parts |= {f"update {number} {payload}": tensors for payload, tensors in update.payloads.items()}
        return parts


def make(seed: int, model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A model with the values of a seed."""
    torch.manual_seed(seed)
    return model().to(dtype)


def difference(a: Run, b: Run) -> float:
    """The largest relative difference of two runs: ||a - b|| / ||a|| over each model, memory, state and payload."""
    one, other = a.values(), b.values()
    assert one.keys() == other.keys()
    assert all(one[part].keys() == other[part].keys() for part in one)
    return max(
        float(_norm(tree.map(lambda x, y: x.double() - y.double(), one[part], other[part])) / (_norm(one[part]) or 1.0))
        for part in one
    )


def _norm(tensors: fl.Tensors) -> Tensor:
    norms = [torch.zeros(()), *(tensor.double().norm() for tensor in tensors.values())]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
