"""The rounds of a run: their tables, the clients of the one under way, evaluations, and the cost of a target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Group, RenderableType
from rich.text import Text

from fl_common import units
from fl_common.units import ACCURACY, BY_CLIENTS, NOTHING, measured, metric_title, value
from fl_ops.render.fitted import FittedTable
from fl_ops.render.text import bar, plain
from fl_server.rounds.metrics import Criterion
from fl_web.facts.rounds import (
    Round,
    evaluated_metrics,
    evaluated_summary,
    lower_is_better,
    metric_of,
    spread,
    update_norms,
    worst_first,
)
from fl_web.facts.run import by_phase, wanted
from fl_web.facts.words import NOT_AWAITED
from protos.fl.v1 import admin_pb2

MOST_NAMED = 10
"""Clients of a line that are named; of more, the number in each phase is shown."""
_EPOCHS_SHOWN = 5
"""First and last epochs of a round with many."""
_BAR = 20


def rounds_table(
    rounds: Sequence[Round],
    metric: str = ACCURACY,
    *,
    under_way: admin_pb2.RunStatus | None = None,
    names_missing: bool = True,
) -> FittedTable:
    """A row for each round. Columns for the clients' evaluations only if there are any.

    metric: of the column beside the loss. under_way: the run whose current round is the last row; None: no such row.
    """
    has_spread = any(spread(row.metrics, metric) for row in rounds)
    client_columns = (">On clients", ">Worst 10 %", ">Best 10 %") if has_spread else ()
    table = FittedTable(
        (">Round", "Phase", ">Clients", f">{_title(metric)}", ">Held-out loss", ">Training loss",
         *client_columns, ">Time", ">Down", ">Up"),
        optional=("Up", "Down", *(name.removeprefix(">") for name in reversed(client_columns)), "Time",
                  "Training loss", "Held-out loss"),
        names_missing=names_missing,
    )  # fmt: skip
    for row in rounds:
        tenths = (row.metrics.get(f"{BY_CLIENTS}{metric}_{end}_decile") for end in ("worst", "best"))
        of_clients = (spread(row.metrics, metric) or NOTHING, *(measured(tenth, metric) for tenth in tenths))
        clients = of_clients if has_spread else ()
        table.add_row(
            str(row.round), "committed", "hidden" if row.hidden else f"{row.accepted}/{row.drawn}",
            measured(row.metrics.get(metric), metric),
            value(row.metrics.get("loss")), value(row.training_loss), *clients, units.duration(row.seconds),
            NOTHING if row.hidden else units.size(row.down), NOTHING if row.hidden else units.size(row.up),
        )  # fmt: skip
    if under_way is not None:
        unknown = [NOTHING] * (6 + len(client_columns))
        phase, count = plain(under_way.phase), f"{under_way.admitted}/{wanted(under_way)}"
        count = "hidden" if under_way.cohorts_hidden else count
        table.add_row(str(under_way.rounds_done), phase, count, *unknown)
    return table


def _title(metric: str) -> str:
    title = units.plain(metric_title(metric))
    return title[:1].upper() + title[1:]


def round_details_table(rounds: Sequence[Round]) -> FittedTable:
    """A row for each round: norms, drop-outs and durations."""
    table = FittedTable(
        (">Round", ">Attempts", ">Update norms", ">Step", ">Direction", ">Cosine", ">Refused", ">Failed", ">Lost",
         ">Late", ">Collecting", ">Other"),
        optional=("Other", "Late", "Attempts", "Cosine", "Direction", "Step", "Collecting"),
    )  # fmt: skip
    for of in rounds:
        seconds = dict(of.phases)
        collecting = seconds.pop("collecting", 0.0)
        table.add_row(
            str(of.round), str(of.attempts), update_norms(of.norms) or NOTHING,
            *(value(of.norms.get(kind)) for kind in ("aggregate", "direction")),
            NOTHING if of.cosine is None else f"{of.cosine:.2f}",
            *(str(of.assignments.get(state, 0)) for state in ("refused", "failed", "lost")), str(of.late),
            *(units.duration(part) if of.phases else NOTHING for part in (collecting, sum(seconds.values()))),
        )  # fmt: skip
    return table


def local_epochs_table(rounds: Sequence[admin_pb2.RoundSummary]) -> FittedTable:
    """A row for each round and metric that clients measured in their local epochs, with the values in order."""
    table = FittedTable((">Round", "Metric", "In each local epoch"))
    for summary in rounds:
        names = sorted({name for epoch in summary.local_epochs for name in epoch.values})
        for name in names:
            values = [value(epoch.values.get(name)) for epoch in summary.local_epochs]
            if len(values) > 2 * _EPOCHS_SHOWN:
                values = [*values[:_EPOCHS_SHOWN], "...", *values[-_EPOCHS_SHOWN:]]
            table.add_row(str(summary.round), plain(name), " ".join(values))
    return table


def evaluations_table(response: admin_pb2.ListEvaluationsResponse) -> RenderableType:
    """A row for each client, the worst by the first metric first; below, the summary of each metric."""
    names = evaluated_metrics(response)
    if not names:
        return Text(f"no client has evaluated round {response.round.round}")
    shown = [units.plain(name) for name in names]
    table = FittedTable(
        ("Client", ">Examples", *(f">{name}" for name in shown)), optional=("Examples", *reversed(shown[1:]))
    )
    for row in worst_first(response):
        values = (measured(row.metrics.get(name), name) for name in names)
        table.add_row(plain(row.client_id), units.count(row.num_examples), *values)
    title = Text(f"round {response.round.round}", style="bold")
    return Group(title, table, *map(plain, evaluated_summary(response)))


def cohort_line(run: admin_pb2.RunStatus, cohort: admin_pb2.ListCohortResponse | None) -> str:
    """The clients of a round that collects: ○ is awaited, with its phase, ● has delivered, · is out.

    cohort: None if it is not known, or of another round: then names alone are shown, and · may have delivered.
    """
    if run.phase != "collecting" or not run.cohort:
        return ""
    counted = f"{bar(run.admitted, wanted(run), _BAR)} {run.admitted} of {wanted(run)}"
    if cohort is None or cohort.round != run.rounds_done or not cohort.members:
        return f"{counted}{_names(run)}"
    if len(run.cohort) > MOST_NAMED:
        return f"{counted}  {phases_text(cohort)}"
    return f"{counted}  " + "  ".join(map(_named, cohort.members))


def phases_text(cohort: admin_pb2.ListCohortResponse) -> str:
    """The number of clients in each phase: 3 training, 1 uploading."""
    return units.plain(", ".join(f"{number:,} {phase}" for phase, number in by_phase(cohort).items()))


def cohort_table(cohort: admin_pb2.ListCohortResponse) -> FittedTable:
    """A row for each client of the round."""
    table = FittedTable(
        ("Client", "Phase", ">Since", ">Transferred", "Detail"),
        optional=("Transferred", "Detail", "Since"),
        wraps=("Detail",),
        names_missing=False,
    )
    for member in cohort.members:
        moved = f"{units.size(member.done_bytes)} of {units.size(member.size_bytes)}" if member.size_bytes else NOTHING
        since = units.duration(member.phase_s) if member.HasField("phase_s") else NOTHING
        table.add_row(plain(member.client_id), plain(member.phase), since, moved, plain(member.detail))
    return table


def _named(member: admin_pb2.CohortMember) -> str:
    mark = "●" if member.phase == "delivered" else "·" if member.phase in NOT_AWAITED else "○"
    if member.phase == "delivered":
        return f"{mark} {member.client_id}"
    share = f" {100 * member.done_bytes // member.size_bytes} %" if member.size_bytes else ""
    since = f" {units.duration(round(member.phase_s))}" if member.phase == "training" and member.phase_s >= 1 else ""
    return f"{mark} {member.client_id} {member.phase}{share}{since}"


def _names(run: admin_pb2.RunStatus) -> str:
    if run.awaited_count > len(run.awaited):  # the others are not known by name
        return ""
    awaited = set(run.awaited)
    others = [client for client in run.cohort if client not in awaited]
    done = "●" if len(others) == run.admitted else "·"
    return "  " + "  ".join(f"{'○' if name in awaited else done} {name}" for name in run.cohort)


@dataclass(frozen=True, slots=True)
class Reached:
    """The first round that reached a target, and the sums up to and with it."""

    round: int
    """0-based: round + 1 rounds were needed."""
    bytes_down: int
    bytes_up: int
    seconds: float
    """Seconds spent in rounds, from the draw of each to its each."""


def rounds_to_target(criterion: Criterion, target: float, rounds: Iterable[admin_pb2.RoundSummary]) -> Reached | None:
    """The first round whose metric is at least as good as the target; None if none is. `rounds` in their order.

    Rounds without an evaluation count as cost and cannot reach the target.
    """
    down = up = 0
    seconds = 0.0
    for each in rounds:
        down, up, seconds = down + each.bytes_down, up + each.bytes_up, seconds + each.seconds
        value = each.metrics.get(criterion.metric)
        if value is not None and criterion.reaches(value, target):
            return Reached(each.round, down, up, seconds)
    return None


@dataclass(frozen=True, slots=True)
class TargetCost:
    """A target, and the cost of reaching it; None if no round reached it."""

    metric: str
    target: float
    reached: Reached | None

    @classmethod
    def of(cls, response: admin_pb2.GetRunResponse, target: float | None) -> Self | None:
        """The cost of this target, or of the run's own; None without a target."""
        stop = response.run.spec.stop
        if target is None and not stop.HasField("target"):
            return None
        criterion, wanted = Criterion(metric_of(stop), lower_is_better(stop)), stop.target if target is None else target
        return cls(criterion.metric, wanted, rounds_to_target(criterion, wanted, response.rounds))

    def text(self) -> str:
        """For example: accuracy 0.8 after 13 rounds, 43 MiB down, 43 MiB up, 3 min 05 s."""
        if self.reached is None:
            return f"{self.metric} {self.target:g} is not reached"
        return (
            f"{self.metric} {self.target:g} after {units.counted(self.reached.round + 1, 'round')}, "
            f"{units.size(self.reached.bytes_down)} down, {units.size(self.reached.bytes_up)} up, "
            f"{units.duration(self.reached.seconds)}"
        )
