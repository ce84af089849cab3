"""What a run came to beside its model, in words: losses, norms, drop-outs, refusals and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from fl_ops import units
from fl_server.client_metrics import by_clients, spread
from protos.fl.v1 import admin_pb2

_ENDS = ("admitted", "refused", "failed", "lost", "cancelled")
_LOSS = "loss"
_LEAST_SHARE = 0.005
"""Of the time: a phase that took less is not named."""
_MOST_STALE = 17


def health_rows(run: admin_pb2.RunStatus, now: float | None = None) -> list[tuple[str, str]]:
    """Names and values to look at where a run does not do as it should; empty values for what there is nothing of."""
    account = run.account
    return [
        ("last commit", _last_commit(run, time.time() if now is None else now)),
        ("evaluation", ", ".join(f"{name} {value(name, run.newest_metrics[name])}" for name in _own(run))),
        ("on clients", on_clients(run.newest_metrics)),
        ("norms", norms(run.latest.account)),
        ("assignments", _counts(account.assignments, _ENDS)),
        ("refused", _counts(account.refused, sorted(account.refused))),
        ("quorum missed", _times(account.quorum_missed)),
        ("late updates", _late(account.staleness)),
        ("time", _shares(account.seconds)),
    ]


def lowest_loss(run: admin_pb2.RunStatus) -> str:
    """Behind the best value of the metric that the run stops by, where that is not the loss itself."""
    if _LOSS not in run.best_metrics or run.spec.stop.metric == _LOSS:
        return ""
    return f"lowest loss {value(_LOSS, run.best_metrics[_LOSS])}"


def value(metric: str, number: float) -> str:
    """An accuracy as a percentage."""
    return units.percent(number) if metric == "accuracy" else short(number)


def norms(account: admin_pb2.RoundAccount) -> str:
    """Of one round: updates 0.31 (0.20 to 0.55), step 0.21, direction 0.90, cosine 0.73."""
    if not account.norms:
        return ""
    words = [f"updates {updates_norms(account.norms)}", f"step {short(account.norms['aggregate'])}"]
    if account.HasField("cosine"):
        words += [f"direction {short(account.norms['direction'])}", f"cosine {account.cosine:.2f}"]
    return ", ".join(words)


def on_clients(metrics: Mapping[str, float]) -> str:
    """Spread over clients: accuracy 81.20 ± 3.10 %, worst tenth 70.00 %."""
    return "; ".join(_spread(name, **statistics) for name, statistics in sorted(spread(metrics).items()))


def _spread(name: str, mean: float, deviation: float, worst_decile: float) -> str:
    if name == "accuracy":
        return f"{name} {100 * mean:.2f} ± {100 * deviation:.2f} %, worst tenth {units.percent(worst_decile)}"
    return f"{name} {short(mean)} ± {short(deviation)}, worst tenth {short(worst_decile)}"


def _own(run: admin_pb2.RunStatus) -> list[str]:
    """Names of the server's own evaluation: accuracy first."""
    names = (name for name in run.newest_metrics if not by_clients(name))
    return sorted(names, key=lambda name: (name != "accuracy", name))


def _last_commit(run: admin_pb2.RunStatus, now: float) -> str:
    if not run.HasField("latest"):
        return ""
    words = f"round {run.latest.round}, {units.moment(run.latest.committed)}"
    if run.HasField("ended"):
        return words
    return f"{words}, {units.duration(max(0.0, now - run.latest.committed.ToNanoseconds() / 1e9))} ago"


def _counts(counts: Mapping[str, int], order: Iterable[str]) -> str:
    return ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in order if counts.get(name))


def _times(count: int) -> str:
    return f"{count:,} time{'' if count == 1 else 's'}" if count else ""


def _late(staleness: Mapping[int, int]) -> str:
    words = []
    for rounds in sorted(staleness):
        if rounds:
            by = "more than 16 rounds" if rounds >= _MOST_STALE else f"{rounds} round{'' if rounds == 1 else 's'}"
            words.append(f"{staleness[rounds]:,} by {by}")
    return ", ".join(words)


def _shares(seconds: Mapping[str, float]) -> str:
    """82 % collecting, 12 % stepping: by what took longest."""
    least = _LEAST_SHARE * (total := sum(seconds.values()))
    longest = sorted((phase for phase in seconds if seconds[phase] >= least > 0), key=lambda phase: -seconds[phase])
    return ", ".join(f"{100 * seconds[phase] / total:.0f} % {phase}" for phase in longest)


def updates_norms(found: Mapping[str, float]) -> str:
    """Mean, and from the smallest to the largest: 0.31 (0.20 to 0.55)."""
    if "update" not in found:
        return ""
    mean, smallest, largest = (short(found[name]) for name in ("update", "update_smallest", "update_largest"))
    return mean if smallest == largest else f"{mean} ({smallest} to {largest})"


def short(number: float) -> str:
    """Three digits: what is looked at is whether it moves."""
    return f"{number:.3g}"
