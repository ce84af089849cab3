"""What a run does, waits for and has reached, what its operator should know, and how long it still takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fl_common import units
from fl_common.privacy.loss_distributions import FIRST_NAME, NAME
from fl_common.units import ACCURACY, LOSS, base_metric, counted, measured, metric_title
from fl_web.facts.rounds import Round, evaluation, metric_of, norms, on_clients
from fl_web.facts.words import PHASES, Fact, about, counts, fact, first_of
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1.training_pb2 import ParameterSchedule

_NAMES_SHOWN = 10
"""Clients of a cohort that are named."""
_PACE_ROUNDS = 10
"""Newest rounds whose pace is taken."""
_ASSIGNMENTS = ("admitted", "refused", "failed", "lost", "cancelled")
_MIN_SHARE = 0.005
"""Phases with a smaller share of the time are left out."""
_MAX_STALENESS = 17
"""The coordinator counts all larger delays under this one."""


def planned_rounds(run: pb.RunStatus | pb.RunOverview) -> int:
    """Committed rounds after which it ends; 0 if nobody knows."""
    return run.rounds_planned if isinstance(run, pb.RunOverview) else run.spec.stop.rounds


def rounds_text(run: pb.RunStatus | pb.RunOverview) -> str:
    """Committed rounds and the planned number: 12 of 40."""
    return f"{run.rounds_done} of {planned_rounds(run) or '?'}"


def delivered(run: pb.RunStatus | pb.RunOverview) -> str:
    """The current phase, and in a round that collects the clients that have delivered: collecting 3/5."""
    shown = run.phase == "collecting" and run.cohort_size
    return f"{run.phase} {run.admitted}/{wanted(run)}" if shown else run.phase


def wanted(run: pb.RunStatus | pb.RunOverview) -> int:
    """The number of updates that the round under way can have; with a buffer, that of its step."""
    return run.buffer.goal if isinstance(run, pb.RunStatus) and run.HasField("buffer") else run.cohort_size


def current(run: pb.RunStatus) -> str:
    """The current phase and the time that it still has: collecting 1/2, 4 min 12 s left."""
    left = f", {_duration_left(run, 0.0)} left" if run.awaited_count and run.HasField("deadline_left_s") else ""
    return f"{delivered(run)}{left}"


def awaited(run: pb.RunStatus, since: float = 0.0) -> str:
    """The awaited clients and their deadline: edge-3 and 4 more, for at most 4 min 12 s.

    since: seconds since the status was received. Empty if nothing is awaited.
    """
    if not run.awaited_count:
        return ""
    names = first_of(run.awaited, run.awaited_count) if run.awaited else counted(run.awaited_count, "client")
    left = f", for at most {_duration_left(run, since)}" if run.HasField("deadline_left_s") else ""
    return f"{names}{left}"


def waits(run: pb.RunStatus, since: float = 0.0) -> str:
    """What a waiting run lacks, or who is awaited in which phase; empty if nothing is."""
    if run.waiting_for:
        return f"waiting for {run.waiting_for}"
    clients = awaited(run, since)
    return f"{run.phase}: waiting for {clients}" if clients else ""


def _duration_left(run: pb.RunStatus, since: float) -> str:
    return units.duration(round(max(0.0, run.deadline_left_s - since)))


def by_phase(cohort: pb.ListCohortResponse) -> dict[str, int]:
    """The number of clients in each phase, in the order of the phases; unknown ones last."""
    numbers = dict(cohort.by_phase)
    order = [*(phase for phase in PHASES if phase in numbers), *sorted(numbers.keys() - {*PHASES})]
    return {phase: numbers[phase] for phase in order}


def seconds_left(run: pb.RunStatus | pb.RunOverview, rounds: Sequence[Round] = ()) -> float | None:
    """The time that the planned rounds still take; None if nobody can know.

    rounds: the newest ones that are known, whose pace is taken. Without two of them it is the mean pace since the run
    was created. It changes with each commit only: a run that hangs does not come to its end.
    """
    left = planned_rounds(run) - run.rounds_done
    if run.HasField("ended") or not run.rounds_done or left <= 0:
        return None
    newest = rounds[-_PACE_ROUNDS - 1 :]
    if len(newest) > 1:
        return max(0.0, left * (newest[-1].committed - newest[0].committed) / (newest[-1].round - newest[0].round))
    latest = run.latest_commit if isinstance(run, pb.RunOverview) else run.latest.committed
    if not latest.seconds:
        return None
    return max(0.0, left * (latest.ToNanoseconds() - run.created.ToNanoseconds()) / 1e9 / run.rounds_done)


def time_left(run: pb.RunStatus | pb.RunOverview, rounds: Sequence[Round] = ()) -> str:
    """The same in words; empty if nobody can know."""
    seconds = seconds_left(run, rounds)
    return "" if seconds is None else about(seconds)


def value_of(run: pb.RunStatus, metrics: Mapping[str, float]) -> str:
    """The value of the run's metric, with its name unless it is an accuracy: 96.41 %, mae 0.12. A dash for none."""
    metric = metric_of(run.spec.stop)
    if metric not in metrics:
        return units.NOTHING
    text = measured(metrics[metric], metric)
    return text if text.endswith("%") else f"{metric} {text}"


_TREND_ROUNDS = 20
"""Newest evaluated rounds of a trend."""


def trend(points: Sequence[tuple[int, float]], metric: str) -> str:
    """How a metric changed: up 1.30 points over 20 rounds. The newer half of the newest values beside the older half.

    points: (round, value) in order. Empty for fewer than four values.
    """
    shown = [(number, of) for number, of in points if math.isfinite(of)][-_TREND_ROUNDS:]
    if len(shown) < _FEWEST_OF_TREND:
        return ""
    values, half = [of for _, of in shown], len(shown) // 2
    change = sum(values[-half:]) / half - sum(values[:half]) / half
    amount = f"{100 * abs(change):.2f} points" if base_metric(metric) == ACCURACY else units.value(abs(change))
    over = f"over {counted(shown[-1][0] - shown[0][0] + 1, 'round')}"
    if abs(change) < _FLAT * max(map(abs, values)):
        return f"flat {over}"
    return f"{'up' if change > 0 else 'down'} {amount} {over}"


_FEWEST_OF_TREND = 4
_FLAT = 0.001
"""A smaller change, as a share of the largest value, is no trend."""


def best(run: pb.RunStatus) -> str:
    """The best round by the run's metric, and the lowest loss."""
    parts = [f"{value_of(run, run.best.metrics)} in round {run.best.round}"] if run.HasField("best") else []
    if LOSS in run.best_metrics and run.spec.stop.metric != LOSS:
        parts.append(f"lowest {metric_title(LOSS)} {measured(run.best_metrics[LOSS], LOSS)}")
    return ", ".join(parts)


def outline(run: pb.RunStatus) -> list[Fact]:
    """What the run is, and how far."""
    return [
        fact("why", run.reason),
        fact("owner", run.spec.owner),
        fact("task", run.spec.task.name),
        fact("algorithm", run.spec.algorithm.name),
        fact("schedules", schedules(run.spec)),
        fact("rounds", rounds_text(run)),
    ]


HIDDEN = "hidden: the draws of a run with privacy of clients are secret"


def under_way(run: pb.RunStatus) -> list[Fact]:
    """The round under way, and the clients that could be drawn."""
    names, buffer = first_of(run.cohort[:_NAMES_SHOWN], run.cohort_size), run.buffer
    cohort = f"{run.admitted}/{counted(run.cohort_size, 'update')} of {names}"
    if run.HasField("buffer"):
        cohort = f"{buffer.working} at work of {names}"
    versions = (
        f"{counted(buffer.versions, 'version')} of the model in use, the oldest {counted(buffer.oldest, 'step')} old"
    )
    in_buffer = f"{buffer.updates} of {counted(buffer.goal, 'update')}; {versions}"
    return [
        fact("phase", f"{run.phase}, attempt {run.attempt}" if run.phase else ""),
        fact("cohort", HIDDEN if run.cohorts_hidden else cohort if run.cohort_size else ""),
        fact("buffer", in_buffer if run.HasField("buffer") else ""),
        fact("awaited", awaited(run)),
        fact("waits for", run.waiting_for),
        fact("eligible clients", "" if run.HasField("ended") else str(run.eligible_clients)),
        fact("over-selection", f"{run.over_selection:.2f} clients for each update" if run.over_selection > 1 else ""),
    ]


def attention(run: pb.RunStatus) -> list[Fact]:
    """What operators should know of the run's clients, with what to do about it."""
    return [
        fact("failed", _latest_failure(run)),
        fact("missing members", _missing(run.states)),
        fact("left out", _left_out(run.states)),
        fact("below their due", _below_due(run)),
        fact("refused by policy", _by_policy(run)),
    ]


def figures(run: pb.RunStatus) -> list[Fact]:
    """Figures that show the health of a run."""
    account, states = run.account, run.states
    latest = run.latest.account
    return [
        fact("evaluation", evaluation(run.newest_metrics)),
        fact("on clients", "; ".join(on_clients(run.newest_metrics))),
        fact("norms", norms(latest.norms, latest.cosine if latest.HasField("cosine") else None)),
        fact("assignments", counts(account.assignments, _ASSIGNMENTS)),
        fact("refused", counts(account.refused)),
        fact("short rounds", f"{account.short}; {account.why_short}" if account.short else ""),
        fact("quorum missed", counted(account.quorum_missed, "time") if account.quorum_missed else ""),
        fact("late updates", _late(account.staleness)),
        fact("time", _shares(account.seconds)),
        fact("client states", f"{counted(states.members, 'member')}" if run.HasField("states") else ""),
        fact("privacy", privacy_text(run)),
        fact("secure aggregation", _secure(run)),
    ]


def models(run: pb.RunStatus) -> list[Fact]:
    """Digests of the latest models."""
    return [
        fact("model's digest", run.latest.model_digest),
        fact("averaged model's digest", run.latest.averaged_digest),
    ]


def schedules(spec: pb.RunSpec) -> str:
    """Each parameter that changes from round to round, with its values; empty without one."""
    rules, parameters = spec.algorithm.schedules, spec.algorithm.parameters.fields
    return "; ".join(
        f"{name}: {_rule(rules[name], parameters[name].number_value, spec.planned_rounds)}"
        for name in sorted(rules)
        if name in parameters
    )


def _rule(schedule: ParameterSchedule, start: float, rounds: int) -> str:
    match schedule.kind:
        case "linear" | "cosine":
            return f"{start:g} in round 0 to {schedule.end:g} in round {max(0, rounds - 1)}, {schedule.kind}"
        case "step":
            milestones = ", ".join(map(str, schedule.milestones))
            return f"{start:g}, times {schedule.factor:g} in round{'s'[: len(schedule.milestones) > 1]} {milestones}"
        case _:
            return f"{start:g} in every round"


def _latest_failure(run: pb.RunStatus) -> str:
    """For example: 3 clients in round 2, the latest edge: KeyError: 'age' (...)."""
    failed = run.latest_failure
    if not run.HasField("latest_failure"):
        return ""
    latest = f"the latest {failed.client_id}: {failed.message}"
    return f"{counted(failed.clients, 'client')} in round {failed.round}, {latest}"


def _missing(states: pb.StateMembers) -> str:
    if not states.missing:
        return ""
    return (
        f"{states.missing} of {states.members}: {first_of(states.first_missing, states.missing)}; without their states "
        f"the model misses its optimum; if they do not return, `fl clients forget {states.first_missing[0]}` restarts "
        "the states"
    )


def _left_out(states: pb.StateMembers) -> str:
    if not states.left_out:
        return ""
    names = first_of(states.first_left_out, states.left_out)
    return f"{names}, for lost client states: `fl clients release {states.first_left_out[0]}` admits it again"


_SECURE = ("members", "sharers", "survivors", "signers", "dropped", "threshold")
"""What is told of the stages of a round, in order."""


def privacy_text(run: pb.RunStatus) -> str:
    """What a private run has spent, by which accountant; empty for another run."""
    if run.HasField("stated_privacy"):
        stated = run.stated_privacy
        largest = f"{stated.largest:.3g} (largest, at delta {stated.delta:g})"
        devices = f"{stated.clients:,} of the run's devices state what their data has spent over all runs"
        return f"{devices}: epsilon {stated.median:.3g} (median), {largest}, by {FIRST_NAME}"
    if not run.HasField("privacy"):
        return ""
    spent, wanted = run.privacy, run.spec.privacy
    held = f"{FIRST_NAME}, of at most {wanted.max_epsilon:g}"
    first = f"{_epsilon(spent.epsilon, spent.epsilon_of_seen_cohorts)} by {held}"
    if spent.HasField("tight_epsilon"):
        seen = spent.tight_epsilon_of_seen_cohorts if spent.HasField("tight_epsilon_of_seen_cohorts") else None
        first = f"{_epsilon(spent.tight_epsilon, seen)} by {NAME}; {first}"
    promised = f"at delta {wanted.delta:g} for each {wanted.unit}"
    draws = f"account {spent.account}; {spent.draws} of {spent.most_draws} draws"
    clip = f"; clip {spent.clip:.3g}" if wanted.HasField("clip_quantile") and spent.clip else ""
    return f"epsilon {promised}: {first}; {draws}{clip}"


def shown_epsilon(run: pb.RunStatus) -> str:
    """What a private run has spent, in one number: by the tighter accountant, or the most that a device states."""
    if run.HasField("stated_privacy"):
        return f"epsilon up to {run.stated_privacy.largest:.3g} at delta {run.stated_privacy.delta:g}"
    if not run.HasField("privacy"):
        return ""
    spent = run.privacy
    tight = spent.tight_epsilon if spent.HasField("tight_epsilon") else spent.epsilon
    return f"epsilon {tight:.3g} at delta {run.spec.privacy.delta:g}"


def _epsilon(hidden: float, seen: float | None) -> str:
    return f"{hidden:.3g}" + ("" if seen is None else f" ({seen:.3g} for who sees the cohorts)")


def _secure(run: pb.RunStatus) -> str:
    """What the coordinator sees, whom it cannot invent, and the latest round's stages."""
    if not run.spec.HasField("secure_aggregation"):
        return ""
    seen = f"sums of {counted(run.spec.secure_aggregation.min_clients, 'client')} or more"
    held = {
        "coordinator": "; the coordinator holds the authority of the clients' certificates: it could invent clients",
        "outside": "; the authority of the clients' certificates is outside of the coordinator",
    }.get(run.clients_authority, "")
    secure = run.latest.account.secure
    return seen + held + (f"; latest round: {counts(secure, _SECURE)}" if secure else "")


def _below_due(run: pb.RunStatus) -> str:
    if not run.below_due:
        return ""
    names = [f"{client.client_id} ({client.counted} counted, {client.due:.1f} due)" for client in run.first_below_due]
    return f"{first_of(names, run.below_due)}; the model learns little of their data"


def _by_policy(run: pb.RunStatus) -> str:
    """For example: 3 clients refuse this run by policy: tasks (2), work (1)."""
    number = sum(run.policy_refusals.values())
    rules = ", ".join(f"{rule} ({run.policy_refusals[rule]})" for rule in sorted(run.policy_refusals))
    verb = "refuses" if number == 1 else "refuse"
    return f"{counted(number, 'client')} {verb} this run by policy: {rules}" if number else ""


def _late(staleness: Mapping[int, int]) -> str:
    parts = []
    for rounds in sorted(staleness):
        if rounds:
            by = "more than 16 rounds" if rounds >= _MAX_STALENESS else counted(rounds, "round")
            parts.append(f"{staleness[rounds]:,} by {by}")
    return ", ".join(parts)


def _shares(seconds: Mapping[str, float]) -> str:
    """Shares of the phases, the longest first: 82 % collecting, 12 % stepping."""
    shortest = _MIN_SHARE * (total := sum(seconds.values()))
    longest = sorted((phase for phase in seconds if seconds[phase] >= shortest > 0), key=lambda phase: -seconds[phase])
    return ", ".join(f"{100 * seconds[phase] / total:.0f} % {phase}" for phase in longest)
