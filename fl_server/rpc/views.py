"""Runs and clients as messages of admin.proto, made from what is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from heapq import nsmallest
from typing import Any, TypeVar

import structlog

from fl_common.units import counted
from fl_server.clients.fleet import Fleet
from fl_server.errors import one_line
from fl_server.leadership import Leading
from fl_server.rounds.sampling import by_id
from fl_server.rounds.state import Phase, RoundState
from fl_server.run.failures import Failures
from fl_server.run.round_statistics import RoundStatistics
from fl_server.run.run import Run
from fl_server.run.status import awaited, lacking, policy_refusals, why_waiting
from fl_server.run.totals import Share
from fl_server.run_settings.privacy import hides_cohorts
from fl_server.runs.attention import Need
from fl_server.runs.table import NotLoaded
from fl_server.store.client_work import ClientWork, EndedWork
from fl_server.store.records import ClientEvaluation, ClientRecord, CommitRecord, HistoryRecord, RunRecord
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import coordinator_pb2, training_pb2
from protos.wire import filled, timestamp

log = structlog.get_logger()
Offer = TypeVar("Offer", coordinator_pb2.TaskOffer, coordinator_pb2.MethodOffer)

MOST_SHOWN = 10
"""Awaited or missing clients that are listed by id."""


def run_status(run: Run) -> pb.RunStatus:
    """The status of a run."""
    state, record, rounds = run.state, run.record, run.rounds
    down, up = rounds.bytes.total
    hidden = run.context.hides_cohorts
    status = pb.RunStatus(
        **_of_devices(run),
        run_id=run.id,
        spec=run.spec,
        state=f"RUN_STATE_{run.status.upper()}",
        reason=run_reason(run),
        rounds_done=rounds.committed,
        phase="" if state.phase is Phase.ENDED else state.phase.value,
        attempt=state.attempt,
        cohort=_cohort(state.drawn),
        cohort_size=len(state.drawn),
        admitted=state.collected,
        created=timestamp(record.created_at),
        bytes_down=down,
        bytes_up=up,
        over_selection=state.draws_per_update,
        account=_account(rounds.totals(), hidden=hidden),
        newest_metrics=rounds.newest_metrics(),
        best_metrics={metric: best.value for metric, best in rounds.best_values().items()},
        lower_is_better=known_directions(run, rounds.newest_metrics()),
        ended=None if record.ended_at is None else timestamp(record.ended_at),
        latest=None if rounds.latest is None else round_summary(rounds.latest, hidden=hidden),
        best=None if rounds.best_commit is None else round_summary(rounds.best_commit, hidden=hidden),
        privacy=_privacy(run),
    )
    if state.policy.buffered and not run.ended:
        status.buffer.CopyFrom(_buffer(state))
    add_waiting(run, status)
    if hidden:
        hide_cohort(status)
    return status


def _of_devices(run: Run) -> dict[str, Any]:
    """The fields of a run's status about the devices that it may draw."""
    rounds = run.rounds
    return {
        "eligible_clients": 0 if run.ended else len(run.eligible.now()),
        "policy_refusals": {} if run.ended else policy_refusals(run.context),
        "below_due": len(rounds.shares.too_low),
        "first_below_due": _below_due(rounds.shares.too_low),
        "latest_failure": _latest_failure(run.submissions.failures),
        "states": _states(run) if run.context.keeps_client_state else None,
        "stated_privacy": None if rounds.stated is None else pb.StatedPrivacy(**rounds.stated._asdict()),
        "clients_authority": run.stages.trust.holder if run.config.secure_aggregation is not None else "",
    }


def _buffer(state: RoundState) -> pb.BufferStatus:
    versions = state.versions_in_use | {state.round}
    return pb.BufferStatus(
        updates=len(state.buffer), goal=state.policy.goal, working=state.working, versions=len(versions),
        oldest=state.round - min(versions),
    )  # fmt: skip


def hide_cohort(status: pb.RunStatus | pb.RunOverview) -> None:
    """Leave out who, and how many, take part in rounds. Every message about a run with hidden cohorts goes through."""
    for field in _OF_COHORTS.intersection(status.DESCRIPTOR.fields_by_name):
        status.ClearField(field)
    status.cohorts_hidden = True


_OF_COHORTS = {
    "cohort", "cohort_size", "admitted", "awaited", "awaited_count", "bytes_down", "bytes_up", "latest_failure",
    "below_due", "first_below_due",
}  # fmt: skip
"""Fields of a run's status."""
_COUNTS = ("assignments", "refused", "staleness", "quorum_missed", "short", "why_short", "secure")
"""Fields of an account that tell of single assignments."""


def _privacy(run: Run) -> pb.PrivacyStatus | None:
    if (account := run.account) is None:
        return None
    draws = run.state.draws
    tight = run.context.services.second.exact(run.id, account.question(draws))
    return pb.PrivacyStatus(
        account=account.name,
        epsilon=account.epsilon(draws),
        epsilon_of_seen_cohorts=account.epsilon(draws, seen=True),
        draws=draws,
        most_draws=account.most,
        clip=_clip(run),
        tight_epsilon=None if tight is None else tight.epsilon,
        tight_epsilon_of_seen_cohorts=None if tight is None else tight.of_seen_cohorts,
    )


def _clip(run: Run) -> float:
    """C of the round under way; of the latest round of a run whose model is not in memory any more; 0: none."""
    if run.context.model.loaded:
        return run.context.model.snapshot.clip
    return run.rounds.latest_statistics.norms.get("clip", 0.0)


def add_leadership(leading: Leading | None, message: pb.WhoAmIResponse | pb.GetOverviewResponse) -> None:
    """Say who leads, if several coordinators may."""
    if leading is None or (leader := leading.leadership.leader) is None:
        return
    shown = message.leadership
    shown.leader, shown.epoch = leader.holder, leader.epoch
    shown.since.CopyFrom(timestamp(leader.since))
    for standby in leading.leadership.standbys:
        shown.standbys.add(
            name=standby.holder, since=timestamp(standby.since), behind_bytes=max(0, standby.behind_bytes)
        )


def add_waiting(run: Run, status: pb.RunStatus | pb.RunOverview) -> None:
    """What the run lacks, and the clients that its current phase waits for, with their deadline."""
    waits = awaited(run, run.deadline, run.client_evaluations)
    status.waiting_for = lacking(run.context, run)
    status.awaited.extend(nsmallest(MOST_SHOWN, waits.clients, key=str.encode))
    status.awaited_count = len(waits.clients)
    if waits.seconds_left is not None:
        status.deadline_left_s = waits.seconds_left


def known_directions(run: Run, metrics: Iterable[str]) -> dict[str, bool]:
    """Whether a lower value is better, for each of the metrics whose direction is known."""
    directions = {name: run.context.directions.lower_is_better(name) for name in metrics}
    return {name: lower for name, lower in directions.items() if lower is not None}


def _latest_failure(failures: Failures) -> pb.FailedWork | None:
    if (latest := failures.latest) is None:
        return None
    failed = timestamp(latest.failed_at)
    return filled(pb.FailedWork, latest, message=latest.detail, time=failed, clients=failures.clients)


@lru_cache(maxsize=8)
def _cohort(drawn: frozenset[str]) -> list[str]:
    """The clients of a cohort in order. It is the same for thousands of events of a round."""
    return sorted(drawn)


def run_shown(run: Run) -> pb.RunStatus:
    """The status of a run, or the reason why it cannot be shown."""
    try:
        return run_status(run)
    except Exception as error:  # noqa: BLE001 - an error in one run must not hide the others
        log.warning("run_not_shown", run=run.id, error=repr(error))
        return problem_status(run.record, f"it cannot be shown: {error}")


def not_loaded_status(run: NotLoaded) -> pb.RunStatus:
    """A run that this coordinator could not load: its names and the reason."""
    status = problem_status(run.record, run.explained, run.state or "unspecified")
    status.spec.task.name, status.spec.algorithm.name = run.named("task"), run.named("algorithm")
    status.spec.owner = run.owner or ""
    return status


def problem_status(record: RunRecord, reason: str, state: str = "unspecified") -> pb.RunStatus:
    """The status of a run of which only the ledger row is known."""
    status = pb.RunStatus(
        run_id=record.run_id,
        state=f"RUN_STATE_{state.upper()}",
        reason=one_line(reason),
        created=timestamp(record.created_at),
        ended=None if record.ended_at is None else timestamp(record.ended_at),
        bytes_down=record.bytes_down,
        bytes_up=record.bytes_up,
    )
    if hides_cohorts(record.spec):
        hide_cohort(status)
    return status


def shorten(status: pb.RunStatus) -> None:
    """Remove what a list of runs does not need; `GetRun` returns it."""
    kept = pb.RunSpec(name=status.spec.name, owner=status.spec.owner)
    kept.task.name, kept.algorithm.name = status.spec.task.name, status.spec.algorithm.name
    kept.stop.CopyFrom(status.spec.stop)
    status.spec.CopyFrom(kept)
    for field in ("account", "cohort", "latest", "awaited"):
        status.ClearField(field)


def _states(run: Run) -> pb.StateMembers:
    states = run.client_states
    missing, left_out = by_id(states.missing), by_id(states.left_out)
    return pb.StateMembers(
        members=len(states.members),
        missing=len(missing),
        first_missing=missing[:MOST_SHOWN],
        left_out=len(left_out),
        first_left_out=left_out[:MOST_SHOWN],
    )


def _below_due(shares: Mapping[str, Share]) -> list[pb.ClientShare]:
    return [filled(pb.ClientShare, shares[client], client_id=client) for client in by_id(shares)[:MOST_SHOWN]]


def run_reason(run: Run) -> str:
    """Why a run waits, ended or failed, or which clients it goes on without."""
    if run.end_reason:
        return "; ".join(filter(None, (run.end_reason, _short(run))))
    if run.run_status.waiting_reason:
        return why_waiting(run.context, run)
    return run.run_status.upload_failure or run.server_evaluation.waits_for or run.eligible.without or _short(run)


def _short(run: Run) -> str:
    """How many rounds have fewer updates than they wanted, and why; empty for none, and where cohorts are hidden."""
    totals = run.rounds.totals()
    verb = "is" if totals.short == 1 else "are"
    what = f"{totals.short} of {counted(run.rounds.committed, 'round')} {verb} short: {totals.why_short}"
    return what if totals.short else ""


def round_summary(commit: CommitRecord, *, hidden: bool) -> pb.RoundSummary:
    """A committed round. hidden: the run's cohorts are."""
    summary = filled(
        pb.RoundSummary,
        commit,
        committed=timestamp(commit.committed_at),
        account=_account(RoundStatistics.from_text(commit.statistics), hidden=hidden) if commit.statistics else None,
        local_epochs=[training_pb2.EpochMetrics(values=epoch) for epoch in commit.epochs],
        cohort_hidden=hidden,
    )
    if hidden:
        for field in ("accepted", "dropped", "bytes_down", "bytes_up"):
            summary.ClearField(field)
    return summary


def _account(statistics: RoundStatistics, *, hidden: bool) -> pb.RoundAccount:
    account = filled(pb.RoundAccount, statistics)
    for field in _COUNTS if hidden else ():
        account.ClearField(field)
    return account


def client_status(fleet: Fleet, record: ClientRecord, needs: Iterable[Need] = ()) -> pb.ClientStatus:
    """The status of a client. needs: why it needs attention."""
    session, standing = fleet.sessions.of(record.client_id), fleet.quarantine.of(record.client_id)
    ends = None if session is None or session.origin.ends is None else timestamp(session.origin.ends)
    until = None if standing is None else timestamp(standing.until)
    return filled(
        pb.ClientStatus,
        record,
        state=f"CLIENT_STATE_{fleet.attendance.state(record.client_id).upper()}",
        availability=fleet.eligibility.availability(record.client_id),
        enrolled_labels=sorted(record.enrolled or ()),
        device=coordinator_pb2.Device(**record.device),
        tasks=[_offer(coordinator_pb2.TaskOffer, task) for task in record.tasks],
        methods=[_offer(coordinator_pb2.MethodOffer, method) for method in record.methods],
        last_seen=timestamp(fleet.attendance.last_seen(record)),
        run_id=fleet.workers.run_of(record.client_id),
        updates_refused=record.work.refused,
        policy_refusals=fleet.eligibility.policy.by(record.client_id),
        work=client_work(record.work),
        attention=[attention(need) for need in needs],
        certificate_end=ends,
        quarantine=None if standing is None else filled(pb.Quarantine, standing, until=until),
    )


def attention(need: Need) -> pb.Attention:
    """Why a client needs attention."""
    return filled(pb.Attention, need, why=one_line(need.why))


def client_work(work: ClientWork) -> pb.ClientWork:
    """What became of a client's assignments."""
    rounds, last = work.newest_rounds()
    return filled(
        pb.ClientWork,
        work,
        newest=work.of_newest(),
        last_failure=_ended_work(work.last_failure),
        last_refusal=_ended_work(work.last_refusal),
        work_s=work.usual("work_s"),
        transfer_s=work.usual("transfer_s"),
        newest_rounds=rounds,
        newest_rounds_last=last,
        slowness=work.usual("slowness"),
    )


def _ended_work(ended: EndedWork | None) -> pb.EndedWork | None:
    return None if ended is None else filled(pb.EndedWork, ended, time=timestamp(ended.time))


def _offer(kind: type[Offer], offer: Mapping[str, Any]) -> Offer:
    """What a client offers, with the name and the fingerprint that the ledger has."""
    numbers: dict[str, Any] = {name: value for name, value in offer.items() if isinstance(value, int)}
    fingerprint = training_pb2.TaskFingerprint(version=offer["version"], source=offer["source"])
    named = {name: offer[name] for name in ("data", "labels", "package") if name in offer}
    return kind(name=offer["name"], fingerprint=fingerprint, **numbers, **named)


def client_evaluation(answer: ClientEvaluation) -> pb.ClientEvaluation:
    """A client's evaluation of a committed model."""
    return filled(pb.ClientEvaluation, answer, reported=timestamp(answer.reported_at))


def history_entry(number: int, entry: HistoryRecord) -> pb.HistoryEntry:
    """A row of the history."""
    return filled(pb.HistoryEntry, entry, time=timestamp(entry.time), number=number)
