"""How much a client has to transfer and to compute, by the run's settings and the client's data."""

from __future__ import annotations

from algorithms import ClientContext
from fl_ops.simulate.federation import Federation
from fl_ops.simulate.system.courses import Amount


class Workload:
    """The amounts of work of a run's clients."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._sizes: dict[str, tuple[int, int, int]] = {}
        self._per_step = 2 if _anchored(federation) else 1

    def training(self, exchange: int, client: str) -> Amount:
        """The work of an exchange, at the model that the federation has prepared for it."""
        federation, (examples, own_batches, _) = self._federation, self._size_of(client)
        algorithm = federation.engine.algorithm
        asked = algorithm.exchanges[exchange]
        gradients = examples if asked.passes else 0
        if asked.trains:
            gradients += self._trained(examples, own_batches) * self._per_step
        if algorithm.gradient.rho > 0:  # SAM takes one gradient for its ascent, and one there
            gradients *= 2
        down = federation.traffic.missing(client, federation.bundles)
        return Amount(down, gradients, federation.engine.shape(exchange).size_bytes)

    def evaluation(self, client: str) -> Amount:
        """The evaluation of the latest model; metrics are no tensor bytes. An example counts like a gradient."""
        federation = self._federation
        return Amount(federation.traffic.missing(client, federation.evaluation_bundles), self._size_of(client)[2], 0)

    def _trained(self, examples: int, own_batches: int) -> int:
        """Number of examples in the batches of all local steps."""
        local = self._federation.config.local
        if local.steps is None:
            return examples * (local.epochs or 1)
        if own_batches:
            return -(-local.steps * examples // own_batches)
        epochs, steps = divmod(local.steps, -(-examples // local.batch_size))
        return epochs * examples + min(steps * local.batch_size, examples)

    def _size_of(self, client: str) -> tuple[int, int, int]:
        """A client's training examples, its own batches of an epoch, and its held-out examples."""
        if client not in self._sizes:
            local = self._federation.clients[client]
            self._sizes[client] = len(local.train), local.train.own_batches, len(local.held_out)
        return self._sizes[client]


def _anchored(federation: Federation) -> bool:
    """Whether each step takes a gradient at y and one at x, as in Mime."""
    algorithm, like = federation.engine.algorithm, federation.snapshot.state.x
    context = ClientContext(like, dict.fromkeys(algorithm.client_init(like), like))
    return algorithm.client_rule(context).anchored
