"""The records of the ledger, as plain frozen values: runs, rounds, stages, clients and history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fl_server.store.client_work import ClientWork

LEFT_OUT = "REFUSAL_REASON_LEFT_OUT"
"""`UpdateRecord.reason` of an admitted and accepted update that the reducer did not select."""


DELETING = "deleting"
"""`RunRecord.state` of a run that is being deleted. A coordinator that starts completes the deletion."""
ENDED = ("completed", "stopped", "failed")
"""`RunRecord.state` of a run that is over."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run between rounds."""

    run_id: str
    spec: Mapping[str, Any]
    """The complete configuration, as JSON values."""
    state: str
    """"waiting", "running", "paused", "completed", "stopped", "failed" or DELETING."""
    reason: str
    """Why it waits, ended or failed; may be empty."""
    created_at: float
    """Unix seconds."""
    ended_at: float | None = None
    elapsed_s: float = 0.0
    """Wall time that counts towards its limit, up to the last write."""
    state_epoch: int = 0
    extended_at: int = 0
    """Committed rounds at the last extension: its stop rules use later evaluations only."""
    bytes_down: int = 0
    """Tensor bytes since it was created, up to the last write."""
    bytes_up: int = 0
    stopping: str = ""
    """Why an operator stops it; empty if none does. It may still commit the model that it computes."""
    load_failure: str = ""
    """Why no start of a coordinator loads it: its code failed then. An operator who continues it has it loaded. Empty
    for all other runs."""


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt at one exchange of a round. It is written before its cohort gets assignments."""

    run_id: str
    round: int
    exchange: int
    attempt: int
    cohort: tuple[str, ...]
    """Clients newly drawn for this attempt, in the order of their id bytes."""
    opened_at: float
    seconds_left: float | None = None
    """Seconds until its deadline, up to the last write; None before the first write."""


@dataclass(frozen=True, slots=True)
class ChargeRecord:
    """What the draw of one attempt costs a privacy account. It is written with the attempt and never removed."""

    account: str
    number: int
    """Counted within the account, from 1, without gaps: another charge in between is an error."""
    run_id: str
    round: int
    attempt: int
    noise_multiplier: float
    rate: float
    """q: with which probability each client is drawn."""
    charged_at: float
    clip: float = 0.0
    """C of the round. 0: of a charge that was made again."""
    fixed_size: bool = False
    """Whether cohorts have a fixed size."""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """The verdict on the update of one (run, round, exchange, client). The first verdict stands."""

    run_id: str
    round: int
    exchange: int
    client_id: str
    digest: bytes
    """BLAKE3-256 of the update's bytes; empty for an update that was refused before they arrived."""
    size_bytes: int
    admitted: bool
    reason: str = ""
    """Name of the RefusalReason if it was refused, or LEFT_OUT; otherwise empty."""
    detail: str = ""
    num_examples: int = 0
    num_steps: int = 0
    training_loss: float | None = None
    norm: float = 0.0
    """L2 norm of the trainable part of its first payload (usually a delta), before clipping."""
    norms: Mapping[str, float] | None = None
    """The norm of each payload by name, and the distance of its buffers from those sent ("buffers"). None for
    refused updates."""
    clip_factor: float = 1.0
    epochs: Sequence[Mapping[str, float]] = ()
    """What the client measured in each local epoch, by name; empty for none."""
    attempt: int = 0
    received_at: float = 0.0
    work_s: float | None = None
    """Seconds from the end of the client's download to the begin of its upload; None if a restart came in between."""
    transfer_s: float | None = None
    """Seconds of its downloads and uploads for this exchange; None if a restart came in between."""
    epsilon: float | None = None
    """What the client's data has spent over all runs, as it says itself; None if its site does not share it."""
    delta: float | None = None
    """The delta of the epsilon; None for an update without privacy of records."""

    @property
    def refused_for(self) -> str:
        """The reason of a refusal in a word: "norm", "not_finite"."""
        return self.reason.removeprefix("REFUSAL_REASON_").lower()

    @property
    def left_out(self) -> bool:
        """Whether it was accepted, but the reducer left it out of the committed model."""
        return self.admitted and bool(self.reason)


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """What went wrong with the work of one (run, round, exchange, client). Most work has no such record."""

    run_id: str
    round: int
    exchange: int
    client_id: str
    failures: int = 0
    """How often it failed."""
    restarts: int = 0
    """The number of further processes of the client's daemon that got its assignment, without an answer in between."""
    instance_id: str = ""
    """The process that it was sent to last, if there was more than one."""
    cause: str = ""
    """Type and place of the latest error if the task's own code raised it; otherwise empty."""
    detail: str = ""
    """The latest reason in words; empty while it has not failed."""
    failed_at: float = 0.0
    """Unix seconds of the latest failure; 0: none."""
    not_finite: bool = False
    """Whether the latest failure was a NaN or an infinity."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One committed round."""

    run_id: str
    round: int
    committed_at: float
    seconds: float
    """Seconds from the draw of the first attempt to the commit."""
    attempts: int
    accepted: int
    dropped: int
    training_loss: float | None
    bytes_down: int
    bytes_up: int
    model_digest: str
    """"blake3:" and hex of the model bundle after this round."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the evaluations by the server and by clients; empty until one is done."""
    state_epoch: int = 0
    """Epoch of the client states that its updates were computed from."""
    over_selection: float = 0.0
    """Clients that the next round draws for each wanted update; 0: the value in the run's configuration."""
    clients_seconds_left: float | None = None
    """Seconds until its evaluation by clients ends, up to the last write; None before the first write."""
    statistics: str = ""
    """Statistics of the round, as text that `fl_server.run` writes."""
    epochs: Sequence[Mapping[str, float]] = ()
    """Means over its updates' examples of what clients measured in each local epoch, by name; empty for none."""
    norms: str = ""
    """What relative norm limits follow from after this round, as text that `fl_server.admission` writes."""
    averaged_digest: str | None = None
    """"blake3:" and hex of the averaged model, as a bundle in the model's layout; None if there is none."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CommitRecord:
        """The inverse of `asdict`, also of values that went through JSON."""
        return cls(**{**values, "epochs": tuple(values.get("epochs") or ())})


@dataclass(frozen=True, slots=True)
class TotalsRecord:
    """Sums and best values of a run's first committed rounds, which a start reads in place of their commits."""

    run_id: str
    rounds: int
    """The rounds 0 to this number - 1 are in it."""
    content: str
    """Text that `fl_server.run` writes."""


@dataclass(frozen=True, slots=True)
class ClientEvaluation:
    """One client's evaluation of a committed model on its own held-out examples."""

    run_id: str
    round: int
    client_id: str
    num_examples: int
    metrics: Mapping[str, float]
    """Means over those examples, by the task's metric names."""
    reported_at: float
    sums: Sequence[Any] = ()
    """The sums of metrics that are no means: (metric, name, shape, values). Only `evaluation_sums` reads them."""


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """A client on the roster, from its first registration until an operator forgets it."""

    client_id: str
    registered_at: float
    last_seen: float
    instance_id: str = ""
    software: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Those of its enrollment, and those that it claims beside them."""
    device: Mapping[str, Any] = field(default_factory=dict)
    """kind, name, memory_bytes."""
    tasks: Sequence[Mapping[str, Any]] = ()
    """name, version, source, train_examples, eval_examples, train_batches where the task makes its batches, and data
    and labels of one of several."""
    methods: Sequence[Mapping[str, str]] = ()
    """Methods from outside: name, version, source."""
    present: bool = False
    """Whether it was attached or suspect at the last write: a restarted coordinator waits for it."""
    banned: bool = False
    draining: bool = False
    note: str = ""
    updates_counted: int = 0
    """Its updates that became part of a model."""
    work: ClientWork = field(default_factory=ClientWork)
    """Like updates_counted, only the ledger counts it: a record in memory has that of the last reading."""
    enrolled: Mapping[str, str] | None = None
    """Labels of its enrollment, which it cannot change. None: it last registered with a certificate of another source,
    or with none."""
    certificate: Mapping[str, Any] | None = None
    """The certificate with which it last attended: serial, begins, ends (Unix seconds), issuer (key id in hex), and
    authorities, the fingerprints of those by which it checked the coordinator. None: it attended with none."""
    releases: bool = False
    """Whether its owner takes released models."""
    packages: Sequence[str] = ()
    """Names of the packages for which it has data."""


def only_banned(client: ClientRecord) -> ClientRecord:
    """The rest of a banned client that was forgotten: its name, the ban and the reason."""
    return ClientRecord(client.client_id, client.registered_at, client.last_seen, banned=True, note=client.note)


@dataclass(frozen=True, slots=True)
class QuarantineRecord:
    """Consecutive refused updates and failures of a client. Most clients have no such record."""

    client_id: str
    refusals: int
    until: float
    """End of its quarantine in Unix seconds: it is not drawn before. 0: no quarantine."""
    reason: str
    """The last refusal or failure."""
    failures: int = 0
    """Consecutive failures of its work."""
    deadlines: int = 0
    """Consecutive deadlines that passed without its update while others delivered."""


@dataclass(frozen=True, slots=True)
class ClientStateRecord:
    """Lost states of a client in one run. The state itself follows from the client's updates."""

    run_id: str
    client_id: str
    losses: int = 0
    """Reports of a lost state since an operator last released the client."""
    lost_epoch: int = -1
    """State epoch of the last report; the state counts again in later epochs. -1: no report."""
    lost_round: int = -1
    """Round of the last report."""
    warned_round: int = -1
    """Round after which operators were warned that the client is missing. -1: no warning."""
    reason: str = ""
    """The last report's text."""


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """One state change: who, what, when, why."""

    time: float
    actor: str
    """"coordinator", "admin:NAME" or "client:NAME"."""
    event: str
    subject: str
    """The run or client that changed."""
    detail: str = ""


class Weighed(NamedTuple):
    """The verdict on an update, with what it does to its client."""

    update: UpdateRecord
    quarantine: QuarantineRecord | None = None
    why: HistoryRecord | None = None
    """The row of history of a new quarantine."""
    package: str = ""
    """Digest of the package that the work was done with; empty for none, and where cohorts are hidden."""


STAGES = ("tossing", "sharing", "collecting", "signing", "opening")
"""The stages after that of the keys, in order, by the values of their phases."""


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage of a round that was opened. It is written before its messages are sent."""

    run_id: str
    round: int
    exchange: int
    attempt: int
    stage: str
    """The value of its phase: "sharing". "collecting" for the masked updates."""
    members: tuple[str, ...]
    """The clients that are asked, in the order of id bytes."""
    closed: tuple[str, ...]
    """The clients whose answers ended the stage before, in this order."""
    opened_at: float


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """A client's answer to a stage. The first one stands. Answers are removed when their round is committed."""

    run_id: str
    round: int
    exchange: int
    attempt: int
    stage: str
    client_id: str
    content: bytes
