"""The interface of the ledger, which every backend implements.

A `Store` keeps runs, attempts, admitted updates, accepted lists, commits, clients and history. Its methods are blocking
and are called from one worker thread. Each call is one transaction and is durable against SIGKILL when it returns.
Tensors are stored elsewhere: updates in the spool, committed models in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fl_server.store.audit_rows import AuditRows
from fl_server.store.certificates import CertificateStore
from fl_server.store.lines import Lines
from fl_server.store.records import (
    AttemptRecord,
    ClientEvaluation,
    ClientRecord,
    ClientStateRecord,
    CommitRecord,
    FailureRecord,
    HistoryRecord,
    QuarantineRecord,
    RunRecord,
    TotalsRecord,
    UpdateRecord,
)


class Weighed(NamedTuple):
    """The verdict on an update, with what it does to its client."""

    update: UpdateRecord
    quarantine: QuarantineRecord | None = None
    why: HistoryRecord | None = None
    """The row of history of a new quarantine."""


class Store(AuditRows, CertificateStore, Lines, Protocol):
    """The ledger. Each method that changes something also takes the line of history that explains the change."""

    @property
    def coordinator_id(self) -> str:
        """Random id of this ledger, made once with it."""
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...

    # runs
    def create_run(self, run: RunRecord, why: HistoryRecord) -> None:
        """Add a run; fsynced. Raises StoreError if the id exists."""
        ...

    def update_run(self, run: RunRecord, why: HistoryRecord | None = None) -> None:
        """Replace the record of run.run_id; fsynced. Raises StoreError if there is no such run."""
        ...

    def set_usage(self, run_id: str, elapsed_s: float, bytes_down: int, bytes_up: int) -> None:
        """Write the time and the bytes that a run has used. This is no change of state."""
        ...

    def runs(self) -> list[RunRecord]:
        """All runs that were not deleted, oldest first."""
        ...

    # removal
    def deleted_runs(self) -> list[str]:
        """Ids of deleted runs, which are never used again."""
        ...

    def remove_rounds(self, run_id: str, before: int) -> bool:
        """Remove everything but the commits of a few rounds before this one, the oldest. Returns whether some are left.

        Everything: attempts, updates, accepted lists and clients' evaluations.
        """
        ...

    def remove_run_history(self, run_id: str) -> bool:
        """Remove some lines that the coordinator wrote about a run. Returns whether some are left.

        Operators' lines stay, and the line that explains the deletion.
        """
        ...

    def remove_run(self, run_id: str, why: HistoryRecord) -> None:
        """Remove the rest of a run in state DELETING, except its id; fsynced. The same call again changes nothing."""
        ...

    # the round under way
    def open_attempt(self, attempt: AttemptRecord, why: HistoryRecord | None = None) -> None:
        """Write a cohort. The same record again changes nothing; another record of the same key is a StoreError."""
        ...

    def attempts(self, run_id: str, round: int) -> list[AttemptRecord]:
        """Attempts of a round, by exchange and attempt."""
        ...

    def set_seconds_left(self, run_id: str, attempt: tuple[int, int, int], seconds: float) -> None:
        """Write the time left of an attempt, named by (round, exchange, attempt). This is no change of state.

        A missing attempt is ignored: its round may have been redrawn.
        """
        ...

    def record_update(
        self, update: UpdateRecord, quarantine: QuarantineRecord | None = None, why: HistoryRecord | None = None
    ) -> UpdateRecord:
        """Write the first verdict on an update and return it; a later one changes nothing and returns the first.

        A refusal counts towards the client's updates_refused. quarantine: replaces the record of a known client.
        """
        ...

    def record_updates(self, verdicts: Sequence[Weighed]) -> list[UpdateRecord]:
        """`record_update` for several updates, in one transaction. Returns the verdicts that stand, in order."""
        ...

    def update_of(self, run_id: str, round: int, exchange: int, client_id: str) -> UpdateRecord | None:
        """One update's record, if there is one."""
        ...

    def updates_of(self, run_id: str, exchange: int, rounds: Sequence[int], client_id: str) -> list[UpdateRecord]:
        """The records of a client in an exchange of these rounds, in any order; no other record is read."""
        ...

    def updates(self, run_id: str, round: int, exchange: int) -> list[UpdateRecord]:
        """The records of an exchange, in the order of client id bytes."""
        ...

    def drop_update(self, run_id: str, round: int, exchange: int, client_id: str, why: HistoryRecord) -> None:
        """Remove the record of an update with a torn or missing file, so that it can be sent again.

        If there is no such record, nothing changes and no history is written.
        """
        ...

    def refuse_accepted(
        self,
        refused: Sequence[UpdateRecord],
        quarantines: Sequence[QuarantineRecord],
        whys: Sequence[HistoryRecord],
    ) -> None:
        """Refuse accepted updates of one exchange, and remove its accepted list, in one transaction.

        The clients' counters and quarantine records change as in `record_update`. refused: the new records. The same
        call again changes nothing; a committed round is a StoreError.
        """
        ...

    def put_failure(self, failure: FailureRecord, why: HistoryRecord | None = None) -> None:
        """Replace what is known of failed work."""
        ...

    def failures(self, run_id: str, round: int) -> list[FailureRecord]:
        """What went wrong in a round, by exchange, in the order of failure."""
        ...

    def latest_failure(self, run_id: str) -> FailureRecord | None:
        """The latest failed work of a run; None if none has failed."""
        ...

    def fix_accepted(self, run_id: str, round: int, exchange: int, accepted: Sequence[tuple[str, bytes]]) -> None:
        """Fix the (client, digest) list of an exchange for good; fsynced.

        Without the fsync, a power cut might leave a checkpoint without its accepted list. The same list again changes
        nothing; another list for the same exchange is a StoreError.
        """
        ...

    def accepted(self, run_id: str, round: int, exchange: int) -> list[tuple[str, bytes]] | None:
        """The fixed list; None before it is fixed."""
        ...

    def restart_round(self, run: RunRecord, round: int, why: HistoryRecord) -> None:
        """Remove the attempts, updates and accepted lists of an uncommitted round, and replace the run's record.

        All in one transaction. A committed round is a StoreError.
        """
        ...

    # commits
    def commit(self, commit: CommitRecord, why: HistoryRecord, left_out: Sequence[str] = ()) -> None:
        """Enter a round with a durable checkpoint; fsynced.

        Adds 1 to updates_counted of the clients accepted in the last exchange. Clients that the reducer left out are
        excepted, and the records of their updates are marked. Quarantine records of counted clients are removed, except
        quarantines that have not ended. The same round again with the same model digest changes nothing; with another
        digest it is a StoreError.
        """
        ...

    def set_metrics(self, run_id: str, round: int, metrics: Mapping[str, float]) -> None:
        """Replace the evaluation of a committed round. Raises StoreError if the round is not committed."""
        ...

    def set_clients_seconds_left(self, run_id: str, round: int, seconds: float) -> None:
        """Write the time left of a round's evaluation by clients. This is no change of state."""
        ...

    def commits(self, run_id: str, first: int = 0, limit: int | None = None) -> list[CommitRecord]:
        """Committed rounds in order, from `first` on, at most `limit`."""
        ...

    def state_epochs(self, run_id: str, rounds: Sequence[int]) -> dict[int, int]:
        """The epochs of client states in these committed rounds, at most 1,000."""
        ...

    def draws(self, run_id: str, first: int, last: int) -> dict[int, tuple[frozenset[str], frozenset[str]]]:
        """Round -> (clients of its cohorts, those accepted in its last exchange), of the rounds `first` to `last`.

        A round whose details were removed, or whose list is not fixed, is left out.
        """
        ...

    def rounds_to_summarise(self, run_id: str, first: int = 0) -> list[int]:
        """Committed rounds, from `first` on, with evaluations by clients that are not part of their metrics yet."""
        ...

    def totals(self, run_id: str) -> TotalsRecord | None:
        """The totals of a run's settled rounds; None if there are none that are valid."""
        ...

    def put_totals(self, totals: TotalsRecord) -> None:
        """Replace the totals of a run's settled rounds. `set_metrics` of one of these rounds removes them."""
        ...

    def record_evaluation(self, evaluation: ClientEvaluation) -> ClientEvaluation:
        """Write a client's evaluation and return it. If there is one already, change nothing and return that."""
        ...

    def evaluations(self, run_id: str, round: int, after: str = "", limit: int | None = None) -> list[ClientEvaluation]:
        """The clients' evaluations of a committed round, in the order of client id bytes: at most `limit` after one.

        Without their sums, which may be large.
        """
        ...

    def evaluation_sums(self, run_id: str, round: int, after: str, limit: int) -> list[tuple[str, Sequence[Any]]]:
        """Clients with the sums of their evaluations of a round, in order of id bytes: at most `limit` after one."""
        ...

    # clients
    def put_clients(self, clients: Sequence[ClientRecord], whys: Sequence[HistoryRecord] = ()) -> None:
        """Add or replace clients, except their counters, which only updates and commits change.

        Of several records of one client the last one counts. whys: lines of history, in order.
        """
        ...

    def forget_client(self, client_id: str, why: HistoryRecord) -> bool:
        """Remove a client from the roster, with its quarantine record and its client states.

        Returns False if there is no such client. History and updates stay. Of a banned client `only_banned` stays: a
        ban ends only by unbanning.
        """
        ...

    def client(self, client_id: str) -> ClientRecord | None:
        """One client; None if it is not on the roster."""
        ...

    def clients(self) -> list[ClientRecord]:
        """All clients in the order of id bytes."""
        ...

    def clients_of(self, client_ids: Sequence[str]) -> list[ClientRecord]:
        """The records of these clients, at most 1,000, in the order of id bytes; unknown ones are left out."""
        ...

    def quarantine_records(self) -> list[QuarantineRecord]:
        """The quarantine records of clients, in the order of id bytes."""
        ...

    def put_quarantine_record(self, quarantine: QuarantineRecord, why: HistoryRecord | None = None) -> None:
        """Replace a client's quarantine record. An unknown client is ignored."""
        ...

    def put_quarantine_records(self, records: Sequence[tuple[QuarantineRecord, HistoryRecord | None]]) -> None:
        """`put_quarantine_record` for several clients, in one transaction."""
        ...

    def clear_quarantine_record(self, client_id: str, why: HistoryRecord) -> bool:
        """Remove a client's quarantine record, and reset its count of lost states in every run.

        Returns False if there was neither; no history is written then.
        """
        ...

    # client states
    def client_state_records(self, run_id: str) -> list[ClientStateRecord]:
        """The records of clients' states in a run, in the order of id bytes."""
        ...

    def put_client_state_records(
        self,
        states: Sequence[ClientStateRecord],
        quarantine: QuarantineRecord | None = None,
        whys: Sequence[HistoryRecord] = (),
    ) -> None:
        """Add or replace these records, with one quarantine record and lines of history, in one transaction.

        Unknown clients are ignored.
        """
        ...


def accepted_updates(store: Store, run_id: str, round_: int, exchange: int) -> list[UpdateRecord]:
    """The accepted updates of an exchange, in the order of client id bytes; blocking."""
    accepted = set(store.accepted(run_id, round_, exchange) or ())
    updates = store.updates(run_id, round_, exchange)
    return [update for update in updates if (update.client_id, update.digest) in accepted]
