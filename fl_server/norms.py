"""How long updates usually are: the norms of those that counted, in rounds that are committed.

Committed rounds alone decide, so the limit is the same for every update of a round, whatever comes first and however
often the coordinator was restarted. The latest rounds do, because norms change as training goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from fl_server.client_states import last_exchange
from fl_server.run_config import RoundSection
from fl_server.store.base import CommitRecord, Store

MIN_ROUNDS = 3
"""Committed rounds before there is a limit."""
WINDOW = 10
"""Committed rounds that are looked at, the latest ones."""


@dataclass(frozen=True, slots=True)
class RelativeNorm:
    """The longest that a delta may be beside earlier ones. As it is: any length."""

    times: float = 0.0
    """Of the median; 0: no limit."""
    median: float = 0.0
    """Norm of earlier updates, as they came; 0: not known yet."""
    clips: bool = False
    """A longer one is scaled down to the limit, not refused."""

    @property
    def limit(self) -> float:
        """The largest norm; 0: none."""
        return self.times * self.median


NO_LIMIT = RelativeNorm()


class NormHistory:
    """Norms of the updates of the latest committed rounds, as they came."""

    def __init__(self) -> None:
        self._rounds: dict[int, tuple[float, ...]] = {}
        self._median = 0.0

    def add(self, round_: int, norms: Iterable[float]) -> None:
        """A round was committed with updates of these norms; its last exchange is meant."""
        self._rounds[round_] = tuple(norms)
        self._rounds = {each: self._rounds[each] for each in sorted(self._rounds)[-WINDOW:]}
        known = [norm for norms in self._rounds.values() for norm in norms]
        self._median = median(known) if known and len(self._rounds) >= MIN_ROUNDS else 0.0

    def read_back(self, store: Store, commits: Sequence[CommitRecord]) -> None:
        """From the ledger, after a restart; blocking. commits: in order."""
        for commit in commits[-WINDOW:]:
            self.add(commit.round, [update.norm for update in last_exchange(store, commit).updates])

    def limit(self, section: RoundSection) -> RelativeNorm:
        """What a run's round asks for now."""
        if not section.max_relative_norm:
            return NO_LIMIT
        return RelativeNorm(section.max_relative_norm, self._median, section.over_relative_norm == "clip")
