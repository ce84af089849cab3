"""The sums of payloads that make all sums of a method where the server may learn sums alone: secure aggregation.

A method's sum is S = sum_i c_i v_i over the payloads v_i of one kind. Clients can multiply with their part of c_i, and
the server with the rest, if

    c_i = A w_i,        w_i = n_i^a / K_i^b        a and b are 0 or 1

where A follows from the number of clients and from sum_i n_i. Then S = A sum_i w_i v_i. Sums with the same payload, a
and b are multiples of one sum. So FedCM with unequal steps needs the sums of delta_i and of delta_i / K_i, and with
equal steps, which are part of A, the first alone. FedNova's A has the mean of the steps: it needs equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from algorithms.base import Exchange, Payload, RoundInfo, UpdateInfo

_SAME = 1e-9
"""Numbers that differ relatively by less than this are equal but for rounding."""


@dataclass(frozen=True, slots=True, order=True)
class Summand:
    """What each client contributes to a sum: w_i v_i."""

    payload: Payload
    by_examples: bool = False
    """a: w_i is proportional to n_i."""
    per_step: bool = False
    """b: w_i is divided by K_i."""

    def share(self, examples: int, steps: int) -> float:
        """w_i."""
        return (examples if self.by_examples else 1) / (steps if self.per_step else 1)


def summands_of(exchange: Exchange, info: RoundInfo, steps: int | None) -> dict[str, Summand | None]:
    """The summand of each sum of an exchange; None where no summand makes it.

    info: of a cohort of `PROBED` clients. steps: K of every client; None: each has its own.
    """
    cohorts = [[UpdateInfo(str(i), n, steps or k) for i, (n, k) in enumerate(probe)] for probe in _PROBES]
    rows = [exchange.sums(cohort, info) for cohort in cohorts]
    summands: dict[str, Summand | None] = {}
    for name, row in rows[0].items():
        choices = (Summand(row.payload, *ab) for ab in ((False, False), (True, False), (False, True), (True, True)))
        coefficients = [one[name].coefficients for one in rows]
        summands[name] = next((it for it in choices if _is_made_of(it, cohorts, coefficients)), None)
    return summands


PROBED = 3
_PROBES: Sequence[Sequence[tuple[int, int]]] = (
    ((4, 1), (4, 1), (4, 1)),
    ((1, 7), (4, 2), (7, 3)),
    ((7, 5), (3, 1), (2, 4)),
)
"""Examples and steps of clients. A must be the same in all cohorts: they have as many clients and examples together."""


def _is_made_of(
    summand: Summand, cohorts: Iterable[Sequence[UpdateInfo]], coefficients: Iterable[Sequence[float]]
) -> bool:
    factors = [
        c / summand.share(client.num_examples, client.num_steps)
        for cohort, row in zip(cohorts, coefficients, strict=True)
        for client, c in zip(cohort, row, strict=True)
    ]
    return all(math.isclose(factor, factors[0], rel_tol=_SAME) for factor in factors)


def factors_of(
    exchange: Exchange, info: RoundInfo, summands: Mapping[str, Summand], cohort: tuple[int, int, int]
) -> dict[str, float]:
    """A of each sum of an exchange.

    summands: of its sums. cohort: the number of clients, all their examples, and the steps of one, which A does not
    depend on.
    """
    clients, examples, steps = cohort
    if not 0 < clients <= examples:
        raise ValueError(f"expected at least one client, with an example each, got {clients} with {examples}")
    rest = [UpdateInfo(str(number), 1, steps) for number in range(1, clients)]
    first = UpdateInfo("0", examples - len(rest), steps)
    rows = exchange.sums([first, *rest], info)
    return {
        name: rows[name].coefficients[0] / summand.share(first.num_examples, steps)
        for name, summand in summands.items()
    }
