"""The summary as Markdown tables, and their insertion into a hand-written page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fl_common.units import NOTHING
from fl_ops.compare.cells import ACCURACY
from fl_ops.compare.data_files import parameters_text
from fl_ops.compare.plan import Plan
from fl_ops.compare.summary import Row, Spread, Tried, decays_differ, rows, tried
from fl_ops.compare.table import TuningSection
from fl_ops.errors import UsageError

DECAYS_DIFFER = (
    "The rows have different effective weight decays, so differences between them are not due to the methods alone."
)
_PUBLISHED = 4
"""Column of a paper's accuracy, before our own."""
_BEGIN, _END = "<!-- fl compare {}: begin -->", "<!-- fl compare {}: end -->"


def tables(plan: Plan) -> str:
    """The results of every split, and the settings that tuning tried."""
    found, metric = rows(plan), plan.table.spec.report.metric
    parts: list[str] = []
    for split in plan.table.spec.splits:
        parts += [f"### Test {metric}, {split}", _result(plan, [row for row in found if row.split == split])]
    if tuning := plan.table.spec.tuning:
        for split in plan.table.spec.splits:
            parts += [f"### Validation {metric} of the search, {split}", _search(plan, tuning, split)]
    return "\n\n".join(parts)


def insert_tables(text: str, plan: Plan) -> str:
    """Replace the text between a page's two marker lines by the tables. Raises UsageError without the markers."""
    begin, end = _BEGIN.format(plan.table.name), _END.format(plan.table.name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UsageError(f"--page: expected the lines {begin} and {end} once each, in this order")
    before, after = text.split(begin, maxsplit=1)[0], text.split(end)[1]
    return f"{before}{begin}\n\n{tables(plan)}\n\n{end}{after}"


def _result(plan: Plan, found: Sequence[Row]) -> str:
    spec = plan.table.spec
    metric, target = spec.report.metric, "target"
    if spec.report.target is not None:
        target = f"{100 * spec.report.target:g} %" if metric == ACCURACY else f"{metric} {spec.report.target:g}"
    heads = [
        "Method", "rate", "effective decay", "own parameters", "final", f"last {spec.report.last}", "best",
        f"rounds to {target}", f"MB down / up to {target}", "MB down / up in all",
    ]  # fmt: skip
    lines = [_result_row(row, len(spec.seeds), metric) for row in found]
    if any(row.published is not None for row in found):
        heads.insert(_PUBLISHED, "published")
        for line, row in zip(lines, found, strict=True):
            line.insert(_PUBLISHED, NOTHING if row.published is None else f"{100 * row.published:.2f}")
    table = _table(heads, lines)
    return f"{table}\n\n{DECAYS_DIFFER}" if decays_differ(found) else table


def _result_row(row: Row, seeds: int, metric: str) -> list[str]:
    if row.choice is None:
        return [row.label, *["not run yet"], *[""] * 8]
    rate = f"{row.choice.learning_rate:g}{' (edge)' if row.at_edge else ''}"
    last = _spread(row.last, metric)
    notes = f" ({len(row.seeds)} of {seeds} seeds)" if len(row.seeds) < seeds else ""
    notes += f" (diverged: {len(row.diverged)} of {len(row.seeds)})" if row.diverged else ""
    reached = row.rounds_to_target
    some = f" ({reached.count} of {len(row.seeds)})" if reached and reached.count < len(row.seeds) else ""
    return [
        row.label + notes,
        rate,
        NOTHING if row.effective_decay is None else f"{row.effective_decay:g}",
        parameters_text(row.choice.own),
        _spread(row.final, metric),
        f"**{last}**" if row.among_best else last,
        _spread(row.best, metric),
        f"{reached.mean:.0f}{some}" if reached else NOTHING,
        _pair(row.down_to_target, row.up_to_target),
        _pair(row.down, row.up),
    ]


def _search(plan: Plan, tuning: TuningSection, split: str) -> str:
    metric = plan.table.spec.report.metric
    experiments = [one for one in plan.experiments if one.experiment.split == split]
    found = [(each, tried(plan, each)) for each in experiments]
    rates = sorted({*tuning.learning_rates, *(one.choice.learning_rate for _, group in found for one in group)})
    lines = []
    for each, group in found:
        cells: dict[str, dict[float, str]] = {}
        for one in group:
            row = cells.setdefault(parameters_text(one.choice.own), {})
            row[one.choice.learning_rate] = (
                f"**{_tried(one, metric)}**" if one.choice == each.choice else _tried(one, metric)
            )
        label = each.experiment.method.label
        lines += [[label, name, *(row.get(rate, "") for rate in rates)] for name, row in cells.items()]
    table = _table(["Method", "own parameters", *(f"rate {rate:g}" for rate in rates)], lines)
    return f"{_search_text(plan, tuning)}\n\n{table}"


def _search_text(plan: Plan, tuning: TuningSection) -> str:
    text = f"Runs of {tuning.rounds} rounds, seed {tuning.seed}. Bold: chosen."
    if not tuning.judge_seeds:
        return text
    seeds = ", ".join(map(str, tuning.judge_seeds))
    rounds = plan.table.run.stop.rounds
    return (
        f"{text} In brackets: mean of the runs of {rounds} rounds with the seeds {seeds}, where the setting was judged."
    )


def _tried(one: Tried, metric: str) -> str:
    text = _share(one.validation, metric)
    if not one.judged:
        return text
    finite = [value for value in one.judged if value is not None]
    return f"{text} ({_share(fmean(finite) if len(finite) == len(one.judged) else None, metric)})"


def _share(value: float | None, metric: str) -> str:
    if value is None:
        return "diverged"
    return f"{100 * value:.1f}" if metric == ACCURACY else f"{value:.4g}"


def _spread(spread: Spread | None, metric: str) -> str:
    """Mean and deviation, of an accuracy in percent."""
    if spread is None:
        return NOTHING
    if metric != ACCURACY:
        return f"{spread.mean:.4g}" + ("" if spread.deviation is None else f" ± {spread.deviation:.2g}")
    return f"{100 * spread.mean:.2f}" + ("" if spread.deviation is None else f" ± {100 * spread.deviation:.2f}")


def _pair(down: Spread | None, up: Spread | None) -> str:
    return f"{down.mean:.0f} / {up.mean:.0f}" if down and up else NOTHING


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", "---", *["--:"] * (len(heads) - 2)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *lines])
