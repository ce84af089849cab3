"""How long updates usually are: the norms of those that counted, in rounds that are committed.

Committed rounds alone decide, so the limit is the same for every update of a round, whatever comes first and however
often the coordinator was restarted. The latest rounds do, because norms change as training goes on. Each vector of an
update (its delta, its other payloads, the distance of its buffers from those that were sent) has a history of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fl_server.client_states import accepted_updates
from fl_server.run_config import RoundSection
from fl_server.store.base import CommitRecord, Store, UpdateRecord

MIN_ROUNDS = 3
"""Committed rounds before there is a limit."""
WINDOW = 10
"""Committed rounds that are looked at, the latest ones."""
DELTA = "delta"
BUFFERS = "buffers"
"""Names of two vectors of an update; the others have the names of their payloads."""
_A_MAJORITY = 3
"""Updates of a round from which on one of them cannot be their median by itself."""


@dataclass(frozen=True, slots=True)
class RelativeNorm:
    """The longest that a vector may be beside earlier ones. As it is: any length."""

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


def norms_of(update: UpdateRecord) -> Mapping[str, float]:
    """The norm of each vector of an update; of one that an older version admitted, that of its delta alone."""
    return {DELTA: update.norm} if update.norms is None else update.norms


class NormHistory:
    """Norms of the updates of the latest committed rounds, as they came, by vector."""

    def __init__(self) -> None:
        self._rounds: dict[str, dict[int, tuple[float, ...]]] = {}
        self._medians: dict[str, float] = {}

    def add(self, round_: int, updates: Iterable[Mapping[str, float]]) -> None:
        """A round was committed with updates that have these norms; those of all its exchanges are meant."""
        found: dict[str, list[float]] = {}
        for norms in updates:
            for vector, norm in norms.items():
                found.setdefault(vector, []).append(norm)
        for vector, lengths in found.items():
            rounds = {**self._rounds.get(vector, {}), round_: tuple(lengths)}
            self._rounds[vector] = {each: rounds[each] for each in sorted(rounds)[-WINDOW:]}
            known = [norm for lengths in self._rounds[vector].values() for norm in lengths]
            self._medians[vector] = median(known) if len(self._rounds[vector]) >= MIN_ROUNDS else 0.0

    def read_back(self, store: Store, commits: Sequence[CommitRecord]) -> None:
        """From the ledger; blocking. commits: in order."""
        for commit in commits[-WINDOW:]:
            self.add(commit.round, [norms_of(update) for update in _all_accepted(store, commit)])

    def usual(self, vector: str) -> float:
        """The median of a vector's norms; 0: not known yet."""
        return self._medians.get(vector, 0.0)

    def limit(self, section: RoundSection) -> RelativeNorm:
        """What a run's round asks of deltas now."""
        if not section.max_relative_norm:
            return NO_LIMIT
        clips = section.over_relative_norm == "clip"
        usual = self.usual(DELTA) if clips else self._growing(DELTA)
        return RelativeNorm(section.max_relative_norm, usual, clips)

    def others(self, section: RoundSection) -> Mapping[str, RelativeNorm]:
        """What it asks of every other vector of which a norm is known."""
        times, vectors = section.max_relative_payload, self._medians.keys() - {DELTA}
        return {vector: RelativeNorm(times, self._growing(vector)) for vector in vectors} if times else {}

    def _growing(self, vector: str) -> float:
        """The median, or that of the latest round where norms grow: a median of ten rounds lags behind them.

        One of two updates could raise the median of its round by itself, so smaller rounds are not looked at.
        """
        usual, rounds = self.usual(vector), self._rounds.get(vector, {})
        latest = rounds[max(rounds)] if rounds else ()
        return max(usual, median(latest)) if usual and len(latest) >= _A_MAJORITY else usual


def _all_accepted(store: Store, commit: CommitRecord) -> list[UpdateRecord]:
    """The accepted updates of a committed round, of an older version those of its last exchange alone."""
    last = max((attempt.exchange for attempt in store.attempts(commit.run_id, commit.round)), default=0)
    found: list[UpdateRecord] = []
    for exchange in range(last + 1):
        updates = accepted_updates(store, commit, exchange)
        found += [update for update in updates if update.norms is not None or exchange == last]
    return found
