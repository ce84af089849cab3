"""The sequential engine: one client after the other in this process. The oracle of all other engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fl_ops.simulate.engines.client_work import ClientWork
from fl_ops.simulate.engines.engine import Bundles, EngineContext, Evaluated, Failed, LocalEngine, Trained
from protos.fl.v1.training_pb2 import Assignment, EvaluationAssignment


class SequentialEngine(LocalEngine):
    """See `LocalEngine`. A client works when its result is fetched, in the order given."""

    def __init__(self, context: EngineContext) -> None:
        self._work = ClientWork(context)
        self._bundles: Bundles = {}

    def begin(self, bundles: Bundles) -> None:
        """See `LocalEngine.begin`."""
        self._bundles = bundles

    def train(self, common: Assignment, clients: Sequence[str], seeds: Sequence[int]) -> Iterator[Trained | Failed]:
        """See `LocalEngine.train`."""
        for client, seed in zip(clients, seeds, strict=True):
            yield self._work.train(common, client, seed, self._bundles)

    def evaluate(self, common: EvaluationAssignment, clients: Sequence[str]) -> Iterator[Evaluated | Failed]:
        """See `LocalEngine.evaluate`."""
        for client in clients:
            yield self._work.evaluate(common, client, self._bundles)
