"""FedBuff: the server rule of buffered asynchronous rounds.

    x_{v+1} = x_v + eta_g * (1/B) sum_i s(a_i) * delta_i,     s(a) = (1 + a)^(-1/2)

B updates are in the buffer; a_i is how many versions the model has moved on since client i was sent its own. With no
staleness this is FedAvg of B clients with uniform weights.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation, AISTATS
2022.
"""

from __future__ import annotations

from collections.abc import Sequence

from algorithms import tree
from algorithms.aggregate import weighted_sums_of_tensors
from algorithms.base import Tensors


def staleness_weights(staleness: Sequence[int]) -> tuple[float, ...]:
    """s(a_i) / B for each update of the buffer. Raises ValueError for an empty buffer or an update from the future."""
    if not staleness or min(staleness) < 0:
        raise ValueError(f"expected staleness of 0 or more versions for at least one update, got {list(staleness)}")
    return tuple((1.0 + a) ** -0.5 / len(staleness) for a in staleness)


def buffered_step(x: Tensors, deltas: Sequence[Tensors], staleness: Sequence[int], eta_g: float = 1.0) -> Tensors:
    """The next x from a full buffer: deltas in the order of client id bytes, each with its staleness."""
    [movement] = weighted_sums_of_tensors(deltas, [staleness_weights(staleness)])
    return tree.add(x, movement, eta_g)
