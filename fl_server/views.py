"""Runs and clients as operators see them: what is in memory, put into the messages of admin.proto."""

from __future__ import annotations

from collections.abc import Iterable

import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from fl_server.account import Account
from fl_server.errors import one_line
from fl_server.fleet import Fleet
from fl_server.round_state import Phase
from fl_server.run import Run
from fl_server.run_config import to_spec
from fl_server.runs.not_loaded import NotLoaded
from fl_server.sampling import by_id
from fl_server.store.base import ClientEvaluation, ClientRecord, CommitRecord, HistoryRecord, RunRecord
from fl_server.waiting import why_waiting
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import coordinator_pb2, training_pb2
from protos.wire import MAX_MESSAGE_BYTES

log = structlog.get_logger()

LIST_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""A list of runs that is larger than this has them without their configurations: the caller takes no larger message."""


def run_status(run: Run) -> pb.RunStatus:
    """A run as it is now."""
    state, record, log = run.state, run.record, run.log
    down, up = log.total_bytes
    status = pb.RunStatus(
        run_id=run.id,
        spec=to_spec(run.config),
        state=f"RUN_STATE_{run.status.upper()}",
        reason=_reason(run),
        rounds_done=len(log.commits),
        phase="" if state.phase is Phase.ENDED else state.phase.value,
        attempt=state.attempt,
        cohort=sorted(state.drawn),
        admitted=len(state.admitted),
        created=timestamp(record.created_at),
        bytes_down=down,
        bytes_up=up,
        eligible_clients=0 if run.ended else len(run.eligible()),
        over_selection=state.draws_per_update,
        account=_account(log.sums_so_far()),
        newest_metrics=log.newest(),
        best_metrics={metric: best.value for metric, best in log.bests().items()},
    )
    if record.ended_at is not None:
        status.ended.CopyFrom(timestamp(record.ended_at))
    if log.latest is not None:
        status.latest.CopyFrom(round_summary(log.latest))
    if log.best is not None:
        status.best.CopyFrom(round_summary(log.commits[log.best.round]))
    if run.behaviour.algorithm.keeps_client_state:
        status.states.CopyFrom(_states(run))
    return status


def runs_listed(runs: Iterable[Run], not_loaded: Iterable[NotLoaded]) -> list[pb.RunStatus]:
    """All runs, the oldest first; one that cannot be shown is there with why, and the others as ever."""
    listed = [_shown(run) for run in runs] + [not_loaded_status(each) for each in not_loaded]
    listed.sort(key=lambda status: status.created.ToNanoseconds())
    size = sum(status.ByteSize() for status in listed)
    for status in listed:
        if size <= LIST_BYTES:
            break
        size -= status.ByteSize()
        _shorten(status)
        size += status.ByteSize()
    return listed


def _shown(run: Run) -> pb.RunStatus:
    try:
        return run_status(run)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one run, the others are shown
        log.warning("run_not_shown", run=run.id, error=repr(error))
        return problem_status(run.record, f"it cannot be shown: {error}")


def not_loaded_status(run: NotLoaded) -> pb.RunStatus:
    """A run that this coordinator cannot use: its names, and why."""
    status = problem_status(run.record, f"not loaded: {run.reason}")
    status.spec.task.name, status.spec.algorithm.name = run.named("task"), run.named("algorithm")
    return status


def problem_status(record: RunRecord, reason: str) -> pb.RunStatus:
    """What is certain of a run of which nothing else can be said."""
    status = pb.RunStatus(run_id=record.run_id, reason=one_line(reason), created=timestamp(record.created_at))
    if record.ended_at is not None:
        status.ended.CopyFrom(timestamp(record.ended_at))
    return status


def _shorten(status: pb.RunStatus) -> None:
    """Without what a list of runs does not need; `GetRun` has it."""
    kept = pb.RunSpec(name=status.spec.name)
    kept.task.name, kept.algorithm.name = status.spec.task.name, status.spec.algorithm.name
    kept.stop.CopyFrom(status.spec.stop)
    status.spec.CopyFrom(kept)
    for field in ("account", "cohort", "latest"):
        status.ClearField(field)


SHOWN = 10
"""Of missing clients."""


def _states(run: Run) -> pb.StateMembers:
    states = run.client_states
    missing, left_out = by_id(states.missing), by_id(states.left_out)
    return pb.StateMembers(
        members=len(states.members),
        missing=len(missing),
        first_missing=missing[:SHOWN],
        left_out=len(left_out),
        first_left_out=left_out[:SHOWN],
    )


def _reason(run: Run) -> str:
    if run.ended and run.state.ending:
        return run.state.ending[1]
    return why_waiting(run, run.waiting_for) if run.waiting_for else ""


def round_summary(commit: CommitRecord) -> pb.RoundSummary:
    """A committed round."""
    return pb.RoundSummary(
        round=commit.round,
        committed=timestamp(commit.committed_at),
        seconds=commit.seconds,
        attempts=commit.attempts,
        accepted=commit.accepted,
        dropped=commit.dropped,
        training_loss=commit.training_loss,
        metrics=commit.metrics,
        bytes_down=commit.bytes_down,
        bytes_up=commit.bytes_up,
        model_digest=commit.model_digest,
        account=_account(Account.of(commit.account)) if commit.account else None,
    )


def _account(account: Account) -> pb.RoundAccount:
    return pb.RoundAccount(
        norms=account.norms,
        cosine=account.cosine,
        assignments=account.assignments,
        refused=account.refused,
        staleness=account.staleness,
        seconds=account.seconds,
        quorum_missed=account.quorum_missed,
    )


def client_status(fleet: Fleet, record: ClientRecord) -> pb.ClientStatus:
    """A client as it is now."""
    offers = [
        coordinator_pb2.TaskOffer(
            name=task["name"],
            fingerprint=training_pb2.TaskFingerprint(version=task["version"], source=task["source"]),
            train_examples=task["train_examples"],
            eval_examples=task["eval_examples"],
        )
        for task in record.tasks
    ]
    status = pb.ClientStatus(
        client_id=record.client_id,
        state=f"CLIENT_STATE_{fleet.state(record.client_id).upper()}",
        banned=record.banned,
        draining=record.draining,
        availability=fleet.workforce.availability(record.client_id),
        labels=record.labels,
        device=coordinator_pb2.Device(**record.device),
        tasks=offers,
        software=record.software,
        last_seen=timestamp(record.last_seen),
        run_id=fleet.workforce.run_of(record.client_id),
        updates_counted=record.updates_counted,
        updates_refused=record.updates_refused,
        note=record.note,
    )
    if standing := fleet.quarantine.of(record.client_id):
        until = timestamp(standing.until)
        status.quarantine.CopyFrom(pb.Quarantine(until=until, refusals=standing.refusals, reason=standing.reason))
    return status


def client_evaluation(answer: ClientEvaluation) -> pb.ClientEvaluation:
    """What a client said of a committed model."""
    return pb.ClientEvaluation(
        client_id=answer.client_id,
        num_examples=answer.num_examples,
        metrics=answer.metrics,
        reported=timestamp(answer.reported_at),
    )


def history_entry(entry: HistoryRecord) -> pb.HistoryEntry:
    """A line of history."""
    return pb.HistoryEntry(
        time=timestamp(entry.time), actor=entry.actor, event=entry.event, subject=entry.subject, detail=entry.detail
    )


def timestamp(seconds: float) -> Timestamp:
    """Unix seconds on the wire."""
    message = Timestamp()
    message.FromNanoseconds(int(seconds * 1e9))
    return message
