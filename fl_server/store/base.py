"""What the coordinator remembers, and the one interface through which it does.

A `Store` keeps the ledger: runs, attempts, admitted updates, accepted lists, commits, clients and history. Its
methods are blocking and are called from one worker thread; each call is one transaction and is durable against
SIGKILL when it returns. Tensor bytes are not here: updates lie in the spool and committed models in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

LEFT_OUT = "REFUSAL_REASON_LEFT_OUT"
"""`UpdateRecord.reason` of an update that was admitted and accepted, and that its round's reducer did not choose."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as it stands between rounds."""

    run_id: str
    spec: Mapping[str, Any]
    """The whole configuration, as JSON values."""
    state: str
    """"waiting", "running", "paused", "completed", "stopped" or "failed"."""
    reason: str
    """Why it waits, ended or failed; may be empty."""
    created_at: float
    """Unix seconds."""
    ended_at: float | None = None
    elapsed_s: float = 0.0
    """Wall time counted towards its limit, up to the last write."""
    state_epoch: int = 0
    extended_at: int = 0
    """Committed rounds when it was last extended: its stop rules look at later evaluations only."""


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One try at one exchange of a round: the cohort, written before anybody of it is told."""

    run_id: str
    round: int
    exchange: int
    attempt: int
    cohort: tuple[str, ...]
    """Clients newly drawn for this attempt, in the order of their id bytes."""
    opened_at: float
    seconds_left: float | None = None
    """Until its deadline, up to the last write; None where an older version wrote the line."""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """The ledger's line on one (run, round, exchange, client): the first word said on it, which stands."""

    run_id: str
    round: int
    exchange: int
    client_id: str
    digest: bytes
    """BLAKE3-256 of the update's bytes; empty when it was refused before they came."""
    size_bytes: int
    admitted: bool
    reason: str = ""
    """Name of the RefusalReason when not admitted, or when it was admitted and its round's reducer left it out."""
    detail: str = ""
    num_examples: int = 0
    num_steps: int = 0
    training_loss: float | None = None
    norm: float = 0.0
    """L2 norm of the trainable part of its first payload, a delta in most exchanges, as it came."""
    norms: Mapping[str, float] | None = None
    """The same of each payload by name, and how far its buffers lie from those sent ("buffers"); None where an older
    version wrote the line, or nothing was admitted."""
    clip_factor: float = 1.0
    attempt: int = 0
    received_at: float = 0.0

    @property
    def left_out(self) -> bool:
        """Whether it was accepted and is no part of the committed model all the same."""
        return self.admitted and bool(self.reason)


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One committed round."""

    run_id: str
    round: int
    committed_at: float
    seconds: float
    """From the draw of the first attempt to the commit."""
    attempts: int
    accepted: int
    dropped: int
    training_loss: float | None
    bytes_down: int
    bytes_up: int
    model_digest: str
    """"blake3:" and hex of the model bundle after this round."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the server's evaluation and the clients'; empty until it is done."""
    state_epoch: int = 0
    """Of the client states that its updates were made from."""
    over_selection: float = 0.0
    """Clients that the next round draws for each update wanted; 0: as the run's configuration says."""
    clients_seconds_left: float | None = None
    """Until its evaluation by clients is over, up to the last write; None before the first."""
    account: str = ""
    """What it came to beside its model, as `account.py` writes it; empty where an older version wrote the line."""


@dataclass(frozen=True, slots=True)
class ClientEvaluation:
    """One client's word on a committed model, by its own held-out part."""

    run_id: str
    round: int
    client_id: str
    num_examples: int
    metrics: Mapping[str, float]
    """Means over those examples, by the task's names."""
    reported_at: float


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """A client as the roster knows it: registered once, remembered until forgotten."""

    client_id: str
    registered_at: float
    last_seen: float
    instance_id: str = ""
    software: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    """kind, name, memory_bytes."""
    tasks: Sequence[Mapping[str, Any]] = ()
    """name, version, source, train_examples, eval_examples."""
    present: bool = False
    """Whether it was attached or suspect when this was written: after a restart it is waited for."""
    banned: bool = False
    draining: bool = False
    note: str = ""
    updates_counted: int = 0
    updates_refused: int = 0


def only_banned(client: ClientRecord) -> ClientRecord:
    """What is left of a banned client that was forgotten: its name, the ban and the reason."""
    return ClientRecord(client.client_id, client.registered_at, client.last_seen, banned=True, note=client.note)


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands against a client: its updates refused, and its work failed, in a row. None for most."""

    client_id: str
    refusals: int
    until: float
    """Unix seconds; it is not drawn before. 0: it has not come to that."""
    reason: str
    """The last refusal or failure, in words."""
    failures: int = 0
    """Failures of its work in a row."""


@dataclass(frozen=True, slots=True)
class StateStanding:
    """What the ledger has on a client's state in one run, beside the updates that the state is made of."""

    run_id: str
    client_id: str
    losses: int = 0
    """Times that the client reported the state as lost, since it was last released."""
    lost_epoch: int = -1
    """State epoch in which it was last reported as lost; the state counts again in a later one. -1: never."""
    lost_round: int = -1
    """Round of that report."""
    warned_round: int = -1
    """Round behind which operators were warned that the client is missing. -1: never."""
    reason: str = ""
    """The last loss, in words."""


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """One state change: who, what, when, why."""

    time: float
    actor: str
    """"coordinator", "admin:NAME" or "client:NAME"."""
    event: str
    subject: str
    """Run or client it is about."""
    detail: str = ""


class StoreError(Exception):
    """The store could not do what was asked; nothing was changed."""


class StoreFull(StoreError):
    """No room, or no right to write. What was stored before stays valid."""


class NoOpenFiles(StoreFull):
    """No further file may be open now, in this process or on this machine. It passes when others are closed."""


class StoreAway(StoreFull):
    """The database cannot be reached, or another coordinator has it: as with a full disk, trying again may help.

    A connection that is lost while a transaction ends leaves open whether it was kept: writing the same again is right.
    """


class StoreTaken(StoreError):
    """Somebody else opened the ledger since: what this coordinator knows is not true any more, and it has to end."""


class Store(Protocol):
    """The ledger. Every method that changes something takes the history line that explains it."""

    @property
    def coordinator_id(self) -> str:
        """Random id of this ledger, made once with it."""
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...

    # runs
    def create_run(self, run: RunRecord, why: HistoryRecord) -> None:
        """Add a run; fsynced. Raises StoreError if the id is taken."""
        ...

    def update_run(self, run: RunRecord, why: HistoryRecord | None = None) -> None:
        """Replace what is stored for run.run_id; fsynced."""
        ...

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""
        ...

    # the round under way
    def open_attempt(self, attempt: AttemptRecord, why: HistoryRecord | None = None) -> None:
        """Write a cohort down. Another one for the same (run, round, exchange, attempt) is a StoreError."""
        ...

    def attempts(self, run_id: str, round: int) -> list[AttemptRecord]:
        """Attempts of a round, by exchange and attempt."""
        ...

    def set_seconds_left(self, run_id: str, attempt: tuple[int, int, int], seconds: float) -> None:
        """Write down how long an attempt, named by (round, exchange, attempt), still has; no change of state.

        An attempt that is not there is passed over: its round may have been drawn anew.
        """
        ...

    def record_update(
        self, update: UpdateRecord, standing: Standing | None = None, why: HistoryRecord | None = None
    ) -> UpdateRecord:
        """Write the first word on an update and return it; if there is one already, change nothing and return that.

        Counts towards the client's updates_refused when it is not admitted. standing: replaces what stands against
        the client, where it is known.
        """
        ...

    def update_of(self, run_id: str, round: int, exchange: int, client_id: str) -> UpdateRecord | None:
        """The ledger's line, if there is one."""
        ...

    def updates_of(self, run_id: str, exchange: int, rounds: Sequence[int], client_id: str) -> list[UpdateRecord]:
        """The ledger's lines on one client in an exchange of these rounds, in no order; no other line is read."""
        ...

    def updates(self, run_id: str, round: int, exchange: int) -> list[UpdateRecord]:
        """The ledger's lines of an exchange, in the order of client id bytes."""
        ...

    def drop_update(self, run_id: str, round: int, exchange: int, client_id: str, why: HistoryRecord) -> None:
        """Take back the line of an update whose file is torn or gone, so that it can be sent again."""
        ...

    def refuse_accepted(
        self, refused: Sequence[UpdateRecord], standings: Sequence[Standing], whys: Sequence[HistoryRecord]
    ) -> None:
        """Take updates out of the accepted list that one exchange was closed with, and forget that list.

        All in one transaction, with what it means for their clients as in `record_update`. refused: the lines as they
        are to be, of one exchange. The same again changes nothing.
        """
        ...

    def fix_accepted(self, run_id: str, round: int, exchange: int, accepted: Sequence[tuple[str, bytes]]) -> None:
        """Write down, once and for all, which (client, digest) make the exchange; fsynced.

        Another list for the same exchange is a StoreError.
        """
        ...

    def accepted(self, run_id: str, round: int, exchange: int) -> list[tuple[str, bytes]] | None:
        """The list as it was fixed; None before that."""
        ...

    def restart_round(self, run: RunRecord, round: int, why: HistoryRecord) -> None:
        """Forget the attempts, updates and accepted lists of an uncommitted round, and replace run's row.

        All in one transaction. A round that has been committed is a StoreError.
        """
        ...

    # commits
    def commit(self, commit: CommitRecord, why: HistoryRecord, left_out: Sequence[str] = ()) -> None:
        """Enter a round whose checkpoint is durable; fsynced. Also adds 1 to updates_counted of its accepted clients.

        But for those that its reducer left out: the lines of their updates say so from now on. Nothing stands against
        those who count any more, but what keeps one from being drawn at that time. Entering the same round again with
        the same model digest changes nothing; with another it is a StoreError.
        """
        ...

    def set_metrics(self, run_id: str, round: int, metrics: Mapping[str, float]) -> None:
        """Add the evaluation of a committed round."""
        ...

    def set_clients_seconds_left(self, run_id: str, round: int, seconds: float) -> None:
        """Write down how long the clients' evaluation of a committed round still has; no change of state."""
        ...

    def commits(self, run_id: str) -> list[CommitRecord]:
        """Committed rounds in order."""
        ...

    def record_evaluation(self, evaluation: ClientEvaluation) -> ClientEvaluation:
        """Write a client's evaluation down and return it; if there is one already, change nothing and return that."""
        ...

    def evaluations(self, run_id: str, round: int) -> list[ClientEvaluation]:
        """The clients' evaluations of a committed round, in the order of client id bytes."""
        ...

    # clients
    def put_clients(self, clients: Sequence[ClientRecord], whys: Sequence[HistoryRecord] = ()) -> None:
        """Add or replace clients, except their counters, which only updates and commits move; the last of one counts.

        whys: lines of history that go with them, in their order.
        """
        ...

    def forget_client(self, client_id: str, why: HistoryRecord) -> bool:
        """Remove a client from the roster, with what stands against it and is known of its states.

        False if there was none. History and ledger stay. Of one that is banned `only_banned` stays: a ban ends by
        unbanning alone.
        """
        ...

    def client(self, client_id: str) -> ClientRecord | None:
        """One client; None if it is not on the roster."""
        ...

    def clients(self) -> list[ClientRecord]:
        """All clients in the order of id bytes."""
        ...

    def standings(self) -> list[Standing]:
        """What stands against clients, in the order of id bytes."""
        ...

    def put_standing(self, standing: Standing, why: HistoryRecord | None = None) -> None:
        """Replace what stands against a client, where it is known; an unknown client is passed over."""
        ...

    def clear_standing(self, client_id: str, why: HistoryRecord) -> bool:
        """Take back what stands against a client, and count its lost states from zero in every run.

        False if nothing did, and then nothing is explained.
        """
        ...

    # client states
    def state_standings(self, run_id: str) -> list[StateStanding]:
        """What is known of clients' states in a run, in the order of id bytes."""
        ...

    def put_state_standings(
        self, states: Sequence[StateStanding], standing: Standing | None = None, whys: Sequence[HistoryRecord] = ()
    ) -> None:
        """Add or replace these, with what stands against one of the clients and lines of history, in one transaction.

        A client that is not known is passed over.
        """
        ...

    # history
    def add_history(self, entry: HistoryRecord) -> None:
        """Write a line of history that goes with no other change."""
        ...

    def history(self, subject: str = "", limit: int = 1000) -> list[HistoryRecord]:
        """The newest `limit` lines about a subject ("" for all), oldest first."""
        ...
