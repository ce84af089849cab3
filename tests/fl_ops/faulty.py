"""A task of whose functions one raises, as an author's own code may."""

from __future__ import annotations

from torch import Tensor, nn

from fl_tasks import Examples, Shard
from tests.fl_ops.points import Points


def _measure(where: str, here: str) -> None:
    if where == here:
        raise RuntimeError("the sensor is unplugged")


class Faulty(Points):
    """where: the function that raises."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self._where = where
        _measure(where, "init")

    def model(self) -> nn.Module:
        _measure(self._where, "model")
        return super().model()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        _measure(self._where, "loss")
        return super().loss(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        _measure(self._where, "metrics")
        return dict(super().metrics(output, target))

    def eval_data(self, shard: Shard | None = None) -> Examples:
        _measure(self._where, "eval_data")
        return super().eval_data(shard)
