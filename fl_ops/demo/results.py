"""What a run came to: its rounds, and the numbers that a comparison is made of."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from fl_ops.demo.dealing import METRIC
from fl_ops.demo.settings import LAST, TARGET, Method
from protos.fl.v1 import admin_pb2

_NAMES = {"fedavg": "FedAvg", "fedcm": "FedCM"}


def title(algorithm: str) -> str:
    """An algorithm as papers write it."""
    return _NAMES.get(algorithm, algorithm)


@dataclass(frozen=True)
class Round:
    """One committed round. number: from 0; accuracy: share of 1 on the held-out data; bytes: of tensors."""

    number: int
    accuracy: float
    loss: float | None
    seconds: float
    clients: int
    bytes_down: int
    bytes_up: int

    @classmethod
    def of(cls, summary: admin_pb2.RoundSummary) -> Self:
        """A round as the coordinator tells it."""
        metrics = dict(summary.metrics)
        return cls(
            number=summary.round,
            accuracy=metrics[METRIC],
            loss=metrics.get("loss"),
            seconds=summary.seconds,
            clients=summary.accepted,
            bytes_down=summary.bytes_down,
            bytes_up=summary.bytes_up,
        )


@dataclass(frozen=True)
class Result:
    """One algorithm's run. parameters: all of them, defaults too; seconds: from its creation to its end."""

    method: Method
    parameters: dict[str, Any]
    rounds: tuple[Round, ...]
    seconds: float

    @property
    def title(self) -> str:
        """The algorithm's name in papers."""
        return title(self.method.algorithm)

    @property
    def last(self) -> list[float]:
        """Accuracy of the last rounds, ten where there are so many."""
        return [one.accuracy for one in self.rounds[-LAST:]]

    @property
    def final(self) -> float:
        """Accuracy after the last round."""
        return self.rounds[-1].accuracy

    @property
    def mean_last(self) -> float:
        """Mean accuracy of the last rounds."""
        return fmean(self.last)

    @property
    def worst_last(self) -> float:
        """Lowest accuracy of the last rounds."""
        return min(self.last)

    @property
    def rounds_to_target(self) -> int | None:
        """Rounds until accuracy first reached the target; None: it never did."""
        return next((one.number + 1 for one in self.rounds if one.accuracy >= TARGET), None)

    @property
    def bytes_down(self) -> int:
        """Tensor bytes to the clients."""
        return sum(one.bytes_down for one in self.rounds)

    @property
    def bytes_up(self) -> int:
        """Tensor bytes from the clients."""
        return sum(one.bytes_up for one in self.rounds)
