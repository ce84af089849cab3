"""Figures that show the health of a run: losses, norms, drop-outs, refusals and durations of phases."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from fl_common import units
from fl_server.rounds.client_metrics import by_clients, spread
from protos.fl.v1 import admin_pb2

_FINAL_STATES = ("admitted", "refused", "failed", "lost", "cancelled")
_LOSS = "loss"
_MIN_SHARE = 0.005
"""Phases with a smaller share of the time are left out."""
_MAX_STALENESS = 17
"""The coordinator counts all larger delays under this one."""


def health_rows(run: admin_pb2.RunStatus, now: float | None = None) -> list[tuple[str, str]]:
    """Names and values for diagnosing a run; the value is empty if there is nothing to show."""
    account = run.account
    return [
        ("last commit", _last_commit(run, time.time() if now is None else now)),
        ("evaluation", _evaluation(run)),
        ("on clients", on_clients(run.newest_metrics)),
        ("norms", norms(run.latest.account)),
        ("assignments", _counts(account.assignments, _FINAL_STATES)),
        ("refused", _counts(account.refused, sorted(account.refused))),
        ("short rounds", f"{account.short}; {account.why_short}" if account.short else ""),
        ("quorum missed", _times(account.quorum_missed)),
        ("late updates", _late(account.staleness)),
        ("time", _shares(account.seconds)),
    ]


def lowest_loss(run: admin_pb2.RunStatus) -> str:
    """The lowest loss, unless the loss is the metric of the run's stop rule."""
    if _LOSS not in run.best_metrics or run.spec.stop.metric == _LOSS:
        return ""
    return f"lowest held-out loss {value(_LOSS, run.best_metrics[_LOSS])}"


def value(metric: str, number: float) -> str:
    """A metric's value; an accuracy is a percentage."""
    return units.percent(number) if units.is_accuracy(metric) else short(number)


def norms(account: admin_pb2.RoundAccount) -> str:
    """The norms of one round: updates 0.31 (0.20 to 0.55), step 0.21, direction 0.90, cosine 0.73."""
    if not account.norms:
        return ""
    parts = [f"updates {update_norms(account.norms)}", f"step {short(account.norms['aggregate'])}"]
    if account.HasField("cosine"):
        parts += [f"direction {short(account.norms['direction'])}", f"cosine {account.cosine:.2f}"]
    return ", ".join(parts)


def on_clients(metrics: Mapping[str, float]) -> str:
    """Spread over clients: accuracy 81.20 ± 3.10 %, worst tenth 70.00 %."""
    return "; ".join(_spread(name, **statistics) for name, statistics in sorted(spread(metrics).items()))


def _spread(name: str, mean: float, deviation: float, worst_decile: float | None = None) -> str:
    """worst_decile: None if the metric's direction is unknown."""
    worst = "" if worst_decile is None else f", worst tenth {value(name, worst_decile)}"
    if name == "accuracy":
        return f"{name} {100 * mean:.2f} ± {100 * deviation:.2f} %{worst}"
    return f"{name} {short(mean)} ± {short(deviation)}{worst}"


def _evaluation(run: admin_pb2.RunStatus) -> str:
    parts = (f"{units.metric_name(name)} {value(name, run.newest_metrics[name])}" for name in _server_metrics(run))
    return ", ".join(parts)


def _server_metrics(run: admin_pb2.RunStatus) -> list[str]:
    """Names of the metrics of the server's own evaluation, accuracy first."""
    names = (name for name in run.newest_metrics if not by_clients(name))
    return sorted(names, key=lambda name: (name != "accuracy", name))


def _last_commit(run: admin_pb2.RunStatus, now: float) -> str:
    if not run.HasField("latest"):
        return ""
    text = f"round {run.latest.round}, {units.moment(run.latest.committed)}"
    if run.HasField("ended"):
        return text
    return f"{text}, {units.duration(max(0.0, now - run.latest.committed.ToNanoseconds() / 1e9))} ago"


def _counts(counts: Mapping[str, int], order: Iterable[str]) -> str:
    return ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in order if counts.get(name))


def _times(count: int) -> str:
    return f"{count:,} time{'' if count == 1 else 's'}" if count else ""


def _late(staleness: Mapping[int, int]) -> str:
    parts = []
    for rounds in sorted(staleness):
        if rounds:
            by = "more than 16 rounds" if rounds >= _MAX_STALENESS else f"{rounds} round{'' if rounds == 1 else 's'}"
            parts.append(f"{staleness[rounds]:,} by {by}")
    return ", ".join(parts)


def _shares(seconds: Mapping[str, float]) -> str:
    """Shares of the phases, the longest first: 82 % collecting, 12 % stepping."""
    shortest = _MIN_SHARE * (total := sum(seconds.values()))
    longest = sorted((phase for phase in seconds if seconds[phase] >= shortest > 0), key=lambda phase: -seconds[phase])
    return ", ".join(f"{100 * seconds[phase] / total:.0f} % {phase}" for phase in longest)


def update_norms(by_kind: Mapping[str, float]) -> str:
    """Mean norm of the updates, and the range: 0.31 (0.20 to 0.55)."""
    if "update" not in by_kind:
        return ""
    mean, smallest, largest = (short(by_kind[name]) for name in ("update", "update_smallest", "update_largest"))
    return mean if smallest == largest else f"{mean} ({smallest} to {largest})"


def short(number: float) -> str:
    """A number with three digits, which are enough to see a trend."""
    return f"{number:.3g}"
