"""Norms of counted updates in committed rounds, and the relative limits that follow from them.

Only committed rounds are used, so the limit is the same for every update of a round, in any order of arrival and after
any restart. Only the latest rounds are used, because norms change during training. Each vector of an update (its delta,
its other payloads, the distance of its buffers from those sent) has its own history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fl_server.round_config import RoundSection
from fl_server.store.protocol import Store, accepted_updates
from fl_server.store.records import CommitRecord, UpdateRecord

MIN_ROUNDS = 3
"""Committed rounds before there is a limit."""
WINDOW = 10
"""Latest committed rounds that are used."""
DELTA = "delta"
BUFFERS = "buffers"
"""Names of two vectors of an update. The others have the names of their payloads."""
_A_MAJORITY = 3
"""Fewest updates of a round in which no single one determines the median."""


@dataclass(frozen=True, slots=True)
class RelativeNorm:
    """A limit on a norm, relative to earlier norms. The default has no limit."""

    times: float = 0.0
    """Multiple of the median; 0: no limit."""
    median: float = 0.0
    """Median norm of earlier updates before clipping; 0: not known yet."""
    clips: bool = False
    """Whether a longer vector is scaled down to the limit instead of refused."""

    @property
    def limit(self) -> float:
        """The largest norm; 0: no limit."""
        return self.times * self.median


NO_LIMIT = RelativeNorm()


def norms_of(update: UpdateRecord) -> Mapping[str, float]:
    """The norm of each vector of an update; only that of the delta in records of older versions."""
    return {DELTA: update.norm} if update.norms is None else update.norms


class NormHistory:
    """Norms of the latest committed rounds, before clipping, by vector."""

    def __init__(self) -> None:
        self._rounds: dict[str, dict[int, tuple[float, ...]]] = {}
        self._medians: dict[str, float] = {}

    def add(self, round_: int, updates: Iterable[Mapping[str, float]]) -> None:
        """Add the norms of a committed round, those of all its exchanges."""
        found: dict[str, list[float]] = {}
        for norms in updates:
            for vector, norm in norms.items():
                found.setdefault(vector, []).append(norm)
        for vector, lengths in found.items():
            rounds = {**self._rounds.get(vector, {}), round_: tuple(lengths)}
            self._rounds[vector] = {each: rounds[each] for each in sorted(rounds)[-WINDOW:]}
            self._measure(vector)

    def _measure(self, vector: str) -> None:
        known = [norm for lengths in self._rounds[vector].values() for norm in lengths]
        self._medians[vector] = median(known) if len(self._rounds[vector]) >= MIN_ROUNDS else 0.0

    @property
    def rounds(self) -> Mapping[str, Mapping[int, Sequence[float]]]:
        """The norms that the limits follow from, by vector and round. Later additions do not change the value."""
        return dict(self._rounds)

    def put_back(self, rounds: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
        """Restore the history that had these `rounds`."""
        self._rounds = {vector: {each: tuple(norms) for each, norms in of.items()} for vector, of in rounds.items()}
        for vector in self._rounds:
            self._measure(vector)

    def read_back(self, store: Store, commits: Sequence[CommitRecord]) -> None:
        """Restore the norms from the ledger; blocking. commits: in order."""
        for commit in commits[-WINDOW:]:
            self.add(commit.round, [norms_of(update) for update in _all_accepted(store, commit)])

    def usual(self, vector: str) -> float:
        """The median norm of a vector; 0: not known yet."""
        return self._medians.get(vector, 0.0)

    def limit(self, section: RoundSection) -> RelativeNorm:
        """The limit for deltas of the round under way."""
        if not section.max_relative_norm:
            return NO_LIMIT
        clips = section.over_relative_norm == "clip"
        usual = self.usual(DELTA) if clips else self._growing(DELTA)
        return RelativeNorm(section.max_relative_norm, usual, clips)

    def others(self, section: RoundSection) -> Mapping[str, RelativeNorm]:
        """The limits for all other vectors with known norms."""
        times, vectors = section.max_relative_payload, self._medians.keys() - {DELTA}
        return {vector: RelativeNorm(times, self._growing(vector)) for vector in vectors} if times else {}

    def _growing(self, vector: str) -> float:
        """The larger of the median and the latest round's median: growing norms run ahead of a median of ten rounds.

        In a round of two, one update could raise the median alone, so small rounds are ignored here.
        """
        usual, rounds = self.usual(vector), self._rounds.get(vector, {})
        latest = rounds[max(rounds)] if rounds else ()
        return max(usual, median(latest)) if usual and len(latest) >= _A_MAJORITY else usual


def _all_accepted(store: Store, commit: CommitRecord) -> list[UpdateRecord]:
    """The accepted updates of a committed round; of rounds of older versions only those of the last exchange."""
    last = max((attempt.exchange for attempt in store.attempts(commit.run_id, commit.round)), default=0)
    found: list[UpdateRecord] = []
    for exchange in range(last + 1):
        updates = accepted_updates(store, commit.run_id, commit.round, exchange)
        found += [update for update in updates if update.norms is not None or exchange == last]
    return found
