"""The second accountant: privacy loss distributions by dp-accounting, tighter and slower than `accountant`.

It is the extra `privacy`. Its import takes 2 s and an answer up to a few seconds, so it is imported by the first call,
and belongs into a thread. Budgets are never held by it: a coordinator without the extra would end a run elsewhere.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

from fl_common.privacy.accountant import Mechanism, Spent, epsilon_of

NAME = "dp-accounting's privacy loss distributions"
"""How outputs name it."""
FIRST_NAME = "Renyi divergences"
"""How outputs name `accountant`, which holds the budgets."""
MOST = 100.0
"""Above this epsilon by the first accountant there is no answer: it would need gigabytes, and nothing is private."""
_INTERVAL = 3e-4
"""The interval of the discrete losses. Every value is an upper bound; a third of it takes three times as long."""


def is_installed() -> bool:
    """Whether the extra is here. Imports nothing."""
    return find_spec("dp_accounting") is not None


def tight_epsilon_of(spent: Spent, delta: float) -> float | None:
    """The smallest epsilon that is proved for these steps together, as `epsilon_of`.

    None without the extra, for samples of a fixed size, and where epsilon is over MOST. Answers are kept. Blocks.
    """
    known = tuple(sorted((mechanism, steps) for mechanism, steps in spent.items() if steps))
    first = epsilon_of(dict(known), delta)
    if not is_installed() or first > MOST or any(mechanism.fixed_size for mechanism, _ in known):
        return None
    return _epsilon(known, delta) if known else 0.0


@lru_cache(maxsize=256)
def _epsilon(known: tuple[tuple[Mechanism, int], ...], delta: float) -> float:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent  # noqa: PLC0415 - takes 2 s, see above
    from dp_accounting.pld import PLDAccountant  # noqa: PLC0415 - the same

    accountant = PLDAccountant(value_discretization_interval=_INTERVAL)
    for mechanism, steps in known:
        noise = GaussianDpEvent(mechanism.noise_multiplier)
        accountant.compose(noise if mechanism.rate == 1.0 else PoissonSampledDpEvent(mechanism.rate, noise), steps)
    return float(accountant.get_epsilon(delta))
