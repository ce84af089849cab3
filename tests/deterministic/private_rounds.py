"""What a life shows of privacy of clients: the charge behind each assignment, and the noise of each sum.

The ledger is read through a connection of its own, so only what is committed is seen.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import algorithms as fl
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.privacy import PrivateSum
from fl_server.store.database.store import Store
from fl_server.store.state_directory import CHARGES
from protos.digests import digest_of

Place = tuple[int, int, tuple[str, ...]]
"""Round, attempt and accepted clients of a sum."""


@dataclass
class PrivateRounds:
    """One life's draws and sums."""

    violations: list[str]
    """The life's."""
    by_noise: dict[bytes, set[tuple[Place, bytes]]] = field(default_factory=lambda: defaultdict(set))
    """Key of noise -> the sums that got it, each by its place and the digest of its noisy mean."""
    by_place: dict[Place, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """The noisy means of each sum; more than one computation of it came before its commit."""

    def assigned(self, state: Path, round_: int, attempt: int) -> None:
        """The coordinator sends an assignment. state: its state directory."""
        with closing(sqlite3.connect(f"file:{state / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
            found = ledger.execute(
                "select number, account from charges where round = ? and attempt <= ?", (round_, attempt)
            ).fetchall()
        where = f"round {round_}.{attempt}"
        if not found:
            self.violations.append(f"an assignment is charged before it is sent: {where} is not")
            return
        number, account = max(found)
        counts = state / "privacy" / CHARGES
        counted = json.loads(counts.read_text())[account]["number"] if counts.exists() else 0
        if counted < number:
            where = f"charge {number} of {where}, and {counted} are counted outside"
            self.violations.append(f"a charge is counted outside of the ledger before work is sent: {where}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the sums of the life's coordinators."""
        update, mean, place = Engine.private_update, PrivateSum.mean, list[Place]()

        def private_update(engine: Engine, snapshot: Any, cohort: Any, sources: Any, attempt: int) -> Any:
            place[:] = [(snapshot.round + 1, attempt, tuple(info.client_id for info, _ in cohort))]
            return update(engine, snapshot, cohort, sources, attempt)

        def noisy_mean(noisy: PrivateSum, updates: Any) -> fl.Tensors:
            made = mean(noisy, updates)
            digest = digest_of(b"".join(made[name].numpy().tobytes() for name in sorted(made)))
            self.by_noise[noisy.noise_key].add((place[0], digest))
            self.by_place[place[0]].add(digest)
            return made

        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(Engine, "private_update", private_update))
            patches.enter_context(mock.patch.object(PrivateSum, "mean", noisy_mean))
            yield

    def check(self, store: Store, run_id: str, account: str) -> None:
        """Check a run that is over. Raises AssertionError."""
        charged = {(charge.round, charge.attempt) for charge in store.charges(account)}
        free = [commit.round for commit in store.commits(run_id) if not any(of == commit.round for of, _ in charged)]
        assert not free, f"no less is charged than released: the rounds {free} are not"
        shared = [sorted(place for place, _ in sums) for sums in self.by_noise.values() if len(sums) > 1]
        assert not shared, f"no two sums share noise: {shared[:2]}"
        changed = [place for place, digests in self.by_place.items() if len(digests) > 1]
        assert not changed, f"a sum that is computed again has the same noise: {changed[:2]}"
