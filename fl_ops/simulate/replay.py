"""A run that a coordinator did, done again from its ledger: who counted in each round stands there, nothing is drawn.

Whatever happened on the way (lost clients, over-selection, attempts given up, states restarted), the models must be
those of the ledger, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fl_client.errors import WorkFailed
from fl_ops.errors import Misused, NotFound, Refused
from fl_ops.simulate.federation import Federation
from fl_server.admission import Refused as NotAdmitted
from fl_server.assignments import Place
from fl_server.run_config import RunConfig, from_stored
from fl_server.step import Diverged
from fl_server.store.base import CommitRecord, RunRecord, Store, StoreError
from fl_server.store.sql import LEDGER, look_at_postgres, open_read_only


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """One committed round, done again."""

    round: int
    accepted: tuple[str, ...]
    expected: str
    """Digest of the model in the ledger."""
    digest: str
    """Of the model that came of it here."""
    differing: tuple[str, ...]
    """Clients whose update is another one here than in the ledger."""

    @property
    def same(self) -> bool:
        """Whether the models are equal, bit for bit."""
        return self.expected == self.digest


def open_ledger(place: Path | str) -> Store:
    """The ledger of a coordinator, which may be running: in its state directory, or at a URL. Raises Misused."""
    in_directory = isinstance(place, Path)
    try:
        return open_read_only(place / LEDGER) if isinstance(place, Path) else look_at_postgres(place)
    except StoreError as error:
        hint = "; one in PostgreSQL is named by --ledger URL" if in_directory else ""
        raise Misused(f"{'--state-dir' if in_directory else '--ledger'}: {error}{hint}") from error


def find_run(ledger: Store, run_id: str) -> RunRecord:
    """A run of the ledger. Raises NotFound."""
    runs = {run.run_id: run for run in ledger.runs()}
    if run_id not in runs:
        raise NotFound(f"there is no run {run_id!r} in the ledger; its runs: {', '.join(runs) or 'none'}")
    return runs[run_id]


def config_of(run: RunRecord) -> RunConfig:
    """The configuration that a run was created with."""
    return from_stored(run.spec)


class Replay:
    """A run's rounds again, one by one.

    Args:
        ledger: where the accepted lists stand.
        run_id: the run; none of its rounds may be missing.
        federation: its engine and clients, at the model before round 0.
    """

    def __init__(self, ledger: Store, run_id: str, federation: Federation) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._federation = federation

    def rounds(self) -> Iterator[ReplayedRound]:
        """Every committed round, up to the first whose model differs. Raises Misused, Refused."""
        for commit in self._ledger.commits(self._run_id):
            replayed = self._round(commit)
            yield replayed
            if not replayed.same:
                return

    def _round(self, commit: CommitRecord) -> ReplayedRound:
        federation, differing = self._federation, []
        if commit.state_epoch != federation.state_epoch:
            federation.restart_states(commit.state_epoch)
        last = len(federation.engine.algorithm.exchanges) - 1
        accepted: list[str] = []
        for exchange in range(last + 1):
            fixed = self._ledger.accepted(self._run_id, commit.round, exchange) or []
            accepted = [client for client, _ in fixed]
            differing += [client for client, digest in fixed if self._work(commit.round, exchange, client) != digest]
            if exchange < last:
                federation.reduce(exchange, accepted)
        self._step(commit.round, accepted)
        federation.commit(accepted)
        return ReplayedRound(
            commit.round, tuple(accepted), commit.model_digest, federation.digest, tuple(dict.fromkeys(differing))
        )

    def _work(self, round_: int, exchange: int, client: str) -> bytes:
        """Digest of the update that the client makes."""
        if client not in self._federation.clients:
            here = ", ".join(list(self._federation.clients)[:3])
            raise Misused(
                f"client {client!r} of round {round_} is not among those here ({here}, ...): give [simulation] the "
                "names and the partition of the run, or name the daemons' files with --client-configs"
            )
        try:
            return self._federation.work(Place(round_, exchange, 0, 0.0), client).digest
        except (WorkFailed, NotAdmitted) as error:
            raise Refused(f"round {round_}: {client} counted, and cannot do here what it did: {error}") from error

    def _step(self, round_: int, accepted: list[str]) -> None:
        if not accepted:
            raise Refused(f"round {round_}: the ledger has no accepted updates of it")
        try:
            self._federation.step(accepted)
        except Diverged as error:
            raise Refused(f"round {round_}: {error}") from error
