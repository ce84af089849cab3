"""A device without a daemon: a task with batch norm, the bundles of a round, and assignments for its trainer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import algorithms as fl
from fl_client.connection.bundles.expected import Bundle, ResourceKey
from fl_client.storage.pending_updates import Update
from fl_client.training.data import LocalTask
from fl_tasks import Examples, Shard
from protos.codec import Layout, pack, unpack
from protos.fl.v1 import tensor_pb2, training_pb2
from protos.wire import payload_kind

FINGERPRINT = training_pb2.TaskFingerprint(version="1", source="sha256:small")

METHODS = {name: fl.build(name) for name in fl.names()} | {"scaffold-I": fl.build("scaffold", option="I")}
"""Every method there is, and the two ways of SCAFFOLD."""
WEIGHTED = {f"{name}-examples": fl.build(name, objective="examples") for name in ("scaffold", "feddyn")}
"""The methods that can minimise the mean over examples, with that objective."""


class Small(nn.Module):
    """Two trainable layers with batch norm between, and one layer frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3] -> [n, 2]."""
        output: Tensor = self.last(self.norm(self.first(x)))
        return output


class SmallTask:
    """A classifier of two classes on random data."""

    version = "1"

    def model(self) -> nn.Module:
        """Values by torch's default generator."""
        return Small()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy."""
        return functional.cross_entropy(output, target)

    def train_data(self, shard: Shard) -> Examples:
        """Not used: `local_task` makes the examples."""
        raise NotImplementedError

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """Not used either."""
        raise NotImplementedError

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Not used either."""
        raise NotImplementedError


def noisy(inputs: Tensor) -> Tensor:
    """An augmentation that draws from torch's default generator."""
    return inputs + 0.1 * torch.randn_like(inputs)


def local_task(seed: int = 1, examples: int = 8) -> LocalTask:
    """A device's own examples."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, 3, generator=draw)
    data = Examples(inputs, torch.arange(examples) % 2, noisy)
    return LocalTask("small", SmallTask(), FINGERPRINT, data, data[:0])


def start() -> nn.Module:
    """A model with the values that every round here starts from."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Small()


def bundles(model: nn.Module, direction: fl.Tensors | None = None) -> dict[ResourceKey, Bundle]:
    """What a coordinator sends down."""
    state = fl.read_state(model)
    made: dict[ResourceKey, Bundle] = {
        tensor_pb2.RESOURCE_KIND_MODEL: _bundle({**state.trainable, **state.buffers}, state.trainable),
        tensor_pb2.RESOURCE_KIND_FROZEN: _bundle(state.frozen, {}),
    }
    if direction is not None:
        made[tensor_pb2.RESOURCE_KIND_DIRECTION] = _bundle(direction, direction)
    return made


def _bundle(tensors: fl.Tensors, trainable: fl.Tensors) -> Bundle:
    layout = Layout.of(tensors, trainable.keys())
    return Bundle(layout, unpack(pack(tensors, layout), layout))


def assignment(algorithm: fl.Algorithm, exchange: int = 0, round_number: int = 0) -> training_pb2.Assignment:
    """Two epochs of batches of three at rate 0.1."""
    made = training_pb2.Assignment(
        key=training_pb2.ExchangeKey(run_id="run", round=round_number, exchange=exchange),
        task="small",
        fingerprint=FINGERPRINT,
        training=training_pb2.LocalTraining(
            algorithm=training_pb2.AlgorithmSpec(name=algorithm.name),
            learning_rate=0.1,
            local_epochs=2,
            batch_size=3,
            seed=11,
        ),
        payloads=[payload_kind(payload) for payload in algorithm.exchanges[exchange].payloads],
    )
    made.training.algorithm.parameters.update(dict(algorithm.parameters))
    return made


def payloads(update: Update) -> dict[training_pb2.PayloadKind, fl.Tensors]:
    """The tensors of an update by the kind of their payload."""
    found: dict[training_pb2.PayloadKind, fl.Tensors] = {}
    base, data = 0, b"".join(update.pieces)
    for payload in update.header.payloads:
        layout = Layout.from_manifest(payload.manifest, 1 << 20)
        found[payload.kind] = unpack(data[base : base + layout.size_bytes], layout)
        base += layout.size_bytes
    assert base == update.header.size_bytes == len(data)
    return found
