"""Finds clients that number their classes differently, by their own evaluations.

The accuracy of such a client stays at chance or below it while that of the others rises: the model learns the others'
numbers. Data that differs much looks alike, so an operator is told, and nothing else follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from fl_server.store.records import ClientEvaluation

METRIC = "accuracy"
FEWEST_CLIENTS, FEWEST_EXAMPLES = 3, 20
"""Fewest clients that are compared, and held-out examples of one that is."""
_USUAL, _SHARE, _RISE = 0.5, 0.5, 0.05
"""Accuracy of the others from which on clients are compared; share of it, and rise since the evaluation before, that a
client must exceed."""


@dataclass(slots=True)
class LabelOrder:
    """What the evaluations of one run say of the order of its clients' labels."""

    suspected: frozenset[str] = frozenset()
    """The clients that stay behind, by the two newest evaluations."""
    told: set[str] | None = None
    """Clients that the run's history names. None: it was not read yet."""
    _last: Sequence[ClientEvaluation] = ()

    def compare(self, answers: Sequence[ClientEvaluation]) -> list[tuple[str, float, float]]:
        """Compare the answers of one more round with those before: the clients that stay behind, as of `behind`."""
        found = behind(answers, self._last)
        self._last, self.suspected = answers, frozenset(client for client, _, _ in found)
        return found

    def restore(self, before: Sequence[ClientEvaluation], last: Sequence[ClientEvaluation]) -> None:
        """Continue after a restart with the answers of the two newest rounds with evaluations."""
        self._last = before
        self.compare(last)


def behind(answers: Sequence[ClientEvaluation], before: Sequence[ClientEvaluation]) -> list[tuple[str, float, float]]:
    """(client, its accuracy, the median of the others) of clients that stay behind in two evaluations of a run.

    answers: of one round; before: of an earlier evaluated one.
    """
    now, then = _accuracies(answers), _accuracies(before)
    return [
        (client, accuracy, usual)
        for client, accuracy in now.items()
        if (usual := _far_behind(client, now)) and _far_behind(client, then) and accuracy - then[client] < _RISE
    ]


def _far_behind(client: str, accuracies: dict[str, float]) -> float:
    """The median of the other clients if this one is far behind it, else 0."""
    others = [accuracy for each, accuracy in accuracies.items() if each != client]
    if client not in accuracies or len(others) < FEWEST_CLIENTS - 1:
        return 0.0
    usual = median_low(others)
    return usual if usual >= _USUAL and accuracies[client] <= _SHARE * usual else 0.0


def _accuracies(answers: Sequence[ClientEvaluation]) -> dict[str, float]:
    return {
        answer.client_id: answer.metrics[METRIC]
        for answer in answers
        if METRIC in answer.metrics and answer.num_examples >= FEWEST_EXAMPLES
    }
