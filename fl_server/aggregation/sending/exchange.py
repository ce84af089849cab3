"""The bundles that a run sends for an exchange, and the checks that its encodings can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

import algorithms as fl
from algorithms.compose import SENT
from algorithms.optimizers.federated import averaged_state
from algorithms.optimizers.spec import PREFIX
from fl_server.aggregation.bundles import master_layout
from fl_server.aggregation.sending.outgoing import Outgoing, check_encodable, in_encoding
from fl_server.aggregation.server_update import check_finite
from fl_server.aggregation.snapshot import Snapshot
from fl_server.run_config import RunConfig
from protos.codec import Layout
from protos.fl.v1.tensor_pb2 import (
    RESOURCE_KIND_DIRECTION,
    RESOURCE_KIND_FROZEN,
    RESOURCE_KIND_MODEL,
    RESOURCE_KIND_OPTIMIZER,
)


@dataclass(frozen=True, slots=True)
class ExchangeBundles:
    """Makes the bundles that the clients of a round are sent after the snapshot of the round before."""

    config: RunConfig
    algorithm: fl.Algorithm
    """With its parameters of the round."""
    layout: Layout
    """Of the model, with its buffers."""
    trainable: Layout
    frozen: fl.Tensors
    """Tensors that no client trains, if they are sent."""

    def outgoing(self, snapshot: Snapshot, exchange: int, sums: Mapping[str, fl.Tensors]) -> list[Outgoing]:
        """Model; direction, optimizer's state and frozen parts if any. sums: of the round's earlier exchanges."""
        model = {**snapshot.parameters, **snapshot.buffers}
        sent = [Outgoing(RESOURCE_KIND_MODEL, model, self.layout)]
        direction = self._direction(snapshot, exchange, sums)
        if direction is not None:
            sent.append(Outgoing(RESOURCE_KIND_DIRECTION, direction, self.trainable))
        if self.algorithm.exchanges[exchange].trains:
            averaged, layout = self._averaged(snapshot), master_layout(self.trainable)
            sent += [
                Outgoing(RESOURCE_KIND_OPTIMIZER, tensors, layout, symbol.removeprefix(PREFIX))
                for symbol, tensors in averaged.items()
            ]
        if self.frozen:
            sent.append(Outgoing(RESOURCE_KIND_FROZEN, self.frozen, Layout.of(self.frozen)))
        return [in_encoding(each, self.config, snapshot.round + 1) for each in sent]

    def _direction(self, snapshot: Snapshot, exchange: int, sums: Mapping[str, fl.Tensors]) -> fl.Tensors | None:
        return self.algorithm.exchanges[exchange].direction(snapshot.state, sums)

    def _averaged(self, snapshot: Snapshot) -> fl.Memory:
        return averaged_state(self.algorithm, snapshot.state, snapshot.round + 1)

    def received_direction(
        self, snapshot: Snapshot, exchange: int, sums: Mapping[str, fl.Tensors]
    ) -> dict[str, fl.Tensors]:
        """The direction that the clients of an exchange received, if it differs from the server's: it was encoded."""
        if self.config.encodings.direction == "plain":
            return {}
        sent = direction_of(self.outgoing(snapshot, exchange, sums))
        return {} if sent is None else {SENT: sent}

    def check(self, snapshot: Snapshot, exchange: int, sums: Mapping[str, fl.Tensors]) -> None:
        """Raises Diverged if the model's dtype or an encoding cannot hold what an exchange of the next round sends."""
        low = snapshot.state.dtypes
        if not low and self.config.encodings.plain_down:
            return
        after = snapshot.round + bool(exchange)
        direction = self._direction(snapshot, exchange, sums)
        if low and direction is not None:
            check_finite(f"the direction as {dtype_names(low)}", direction, after)
        for outgoing in self.outgoing(snapshot, exchange, sums):
            check_encodable(outgoing, after)


def direction_of(outgoing: list[Outgoing]) -> fl.Tensors | None:
    """The direction among the bundles of an exchange as clients receive it; None if there is none."""
    return next((each.received(each.bundle()) for each in outgoing if each.kind == RESOURCE_KIND_DIRECTION), None)


def dtype_names(dtypes: Mapping[str, torch.dtype]) -> str:
    """The dtypes of some parameters in words."""
    return " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()}))
