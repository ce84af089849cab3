"""The summary as Markdown tables, and their insertion into a hand-written page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from fl_common.units import NOTHING
from fl_ops.compare.cells import in_percent
from fl_ops.compare.plan import Plan
from fl_ops.compare.results import parameters_text
from fl_ops.compare.summary import Row, Spread, Tried, decays_differ, paired, ranked, rows, tried
from fl_ops.compare.table import TuningSection
from fl_ops.errors import UsageError
from fl_ops.simulate.measures.section import EIGENVALUE, RISE, TRACE
from fl_server.rounds.metrics import PREFIX, TRAINING, Criterion, on_server

DECAYS_DIFFER = (
    "The rows have different effective weight decays, so differences between them are not due to the methods alone."
)
MOVED = "MB down / up in all"
_BEGIN, _END = "<!-- fl compare {}: begin -->", "<!-- fl compare {}: end -->"


def tables(plan: Plan) -> str:
    """The results of every split, and the settings that tuning tried."""
    parts, spec = [_results(plan)], plan.table.spec
    if tuning := spec.tuning:
        for criterion, split in product(spec.report.criteria, spec.splits):
            heading = f"### Validation {criterion.metric} of the search, {split}"
            parts += [heading, _search(plan, tuning, criterion, split)]
    return "\n\n".join(parts)


def _results(plan: Plan) -> str:
    """The results of every split."""
    every_row, spec = rows(plan), plan.table.spec
    parts: list[str] = []
    if not any(row.seeds or row.choice is None for row in every_row):
        return _published(every_row, list(spec.splits))
    for criterion, split in product(spec.report.criteria, spec.splits):
        group = [row for row in every_row if (row.metric, row.split) == (criterion.metric, split)]
        parts += [f"### Test {criterion.metric}, {split}", _result(plan, group, criterion)]
        if measured := _measured(plan, group, criterion.metric):
            parts += [f"### Over clients and flatness, {criterion.metric}, {split}", measured]
    return "\n\n".join(parts)


def insert_tables(text: str, plan: Plan) -> str:
    """Replace the text between a page's two marker lines by the results, without the tried settings.

    Raises UsageError without the markers.
    """
    begin, end = _BEGIN.format(plan.table.name), _END.format(plan.table.name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UsageError(f"--page: expected the lines {begin} and {end} once each, in this order")
    before, after = text.split(begin, maxsplit=1)[0], text.split(end)[1]
    return f"{before}{begin}\n\n{_results(plan)}\n\n{end}{after}"


def _result(plan: Plan, group: Sequence[Row], criterion: Criterion) -> str:
    spec, metric = plan.table.spec, criterion.metric
    without = [row.label for row in group if not _is_shown(row)]
    group = [row for row in group if _is_shown(row)]
    columns = _columns(plan, group, metric)
    moved = {columns[MOVED](row) for row in group if row.choice}
    if len(moved) == 1 and len(group) > 1:
        del columns[MOVED]
    lines = [[row.label + _seeds_left(row, len(spec.seeds)), *_cells(row, columns)] for row in group]
    parts = [
        _table(["Method", *columns], lines) if lines else "",
        _first(group, criterion),
        next(filter(None, (result.without(metric) for _, result in plan.results())), ""),
        DECAYS_DIFFER if decays_differ(group) else "",
        _same(group, moved),
        _arithmetic(plan) if lines else "",
        f"Not run: {'; '.join(without)}." if without else "",
    ]
    return "\n\n".join(filter(None, parts))


def _arithmetic(plan: Plan) -> str:
    """The device and the precision of clients in lockstep; empty for clients one at a time."""
    engine = plan.table.engine
    if not engine:
        return ""
    return f"Clients in lockstep on {engine.get('gpu', engine['device'])}, precision {engine['precision']}."


def _columns(plan: Plan, group: Sequence[Row], metric: str) -> dict[str, Callable[[Row], str]]:
    """Head -> text of a row's cell. A column is left out where no row can have a value, or all decays are the same.

    summary.csv has the accuracy after the last round and the best one, too.
    """
    report = plan.table.spec.report
    columns: dict[str, Callable[[Row], str]] = {"rate": _rate}
    if decays_differ(group):
        columns["effective decay"] = lambda row: NOTHING if row.effective_decay is None else f"{row.effective_decay:g}"
    columns["own parameters"] = lambda row: _own(row.choice.own) if row.choice else ""
    if any(row.published is not None for row in group):
        columns["published"] = lambda row: NOTHING if row.published is None else f"{100 * row.published:.2f}"
    columns[f"last {report.last}"] = lambda row: _last(row, metric)
    if report.baseline:
        columns[f"to {report.baseline}"] = lambda row: _difference(row.difference, metric)
    if (value := report.target_of(metric)) is not None:
        target = f"{100 * value:g} %" if in_percent(metric) else f"{metric} {value:g}"
        columns[f"rounds to {target}"] = _rounds_to_target
        columns[f"MB down / up to {target}"] = lambda row: _pair(row.down_to_target, row.up_to_target)
    columns[MOVED] = lambda row: _pair(row.down, row.up)
    return columns


def _cells(row: Row, columns: Mapping[str, Callable[[Row], str]]) -> list[str]:
    first, *rest = (cell(row) for cell in columns.values())
    return [first if row.choice else "not run yet", *rest]


def _seeds_left(row: Row, seeds: int) -> str:
    """What a row's label says of the seeds that its means do not have."""
    if row.choice is None:
        return ""
    notes = f" ({len(row.seeds)} of {seeds} seeds)" if len(row.seeds) < seeds else ""
    return notes + (f" (diverged: {len(row.diverged)} of {len(row.seeds)})" if row.diverged else "")


def _rate(row: Row) -> str:
    return f"{row.choice.learning_rate:g}{' (edge)' if row.at_edge else ''}" if row.choice else ""


def _own(own: Mapping[str, Any]) -> str:
    """Without the rate, which has a column."""
    return parameters_text({name: value for name, value in own.items() if name != "learning_rate"})


def _last(row: Row, metric: str) -> str:
    text = _spread(row.last, metric)
    return f"**{text}**" if row.among_best else text


def _rounds_to_target(row: Row) -> str:
    if not (reached := row.rounds_to_target):
        return NOTHING
    return f"{reached.mean:.0f}" + (f" ({reached.count} of {len(row.seeds)})" if reached.count < len(row.seeds) else "")


def _same(group: Sequence[Row], moved: Collection[str]) -> str:
    """What all rows have in common: their effective weight decay and their megabytes; empty if that is nothing."""
    decay = None if decays_differ(group) else next((row.effective_decay for row in group if row.effective_decay), None)
    facts = [f"effective weight decay {decay:g}"] if decay else []
    facts += [f"{next(iter(moved))} {MOVED}"] if len(moved) == 1 and len(group) > 1 else []
    return f"Every row: {', '.join(facts)}." if facts else ""


_OVER_CLIENTS = {"mean": "mean", "std": "deviation", "worst_decile": "worst 10 %", "best_decile": "best 10 %"}
"""Ending of a statistic over clients -> its words in a head."""
_FLATNESS = {EIGENVALUE: "largest eigenvalue", TRACE: "trace", RISE: "rise"}
MEASURED = (
    "After the last round, mean and deviation over the seeds. Train: the model on each client's own training examples;"
    " on clients: on each client's held-out examples. Deviation: over clients. Worst and best 10 %: the mean of the"
    " ceil(n / 10) worst and best clients."
)


def _measured(plan: Plan, group: Sequence[Row], metric: str) -> str:
    """The table of what the runs measured beyond the server's evaluations, and its note; empty if nothing."""
    own = on_server(metric)
    columns = {
        f"{PREFIX}{which}{own}_{ending}": (f"{words}, {head}", metric)
        for which, words in ((TRAINING, "train"), ("", "on clients"))
        for ending, head in _OVER_CLIENTS.items()
    } | {name: (head, name) for name, head in _FLATNESS.items()}
    shown = {name: column for name, column in columns.items() if any(name in row.measured for row in group)}
    if not shown:
        return ""
    group = [row for row in group if row.measured]
    lines = [[row.label, *(_spread(row.measured.get(name), of) for name, (_, of) in shown.items())] for row in group]
    measure = plan.table.spec.simulation.measure
    flatness = measure.sharpness.text() if measure and measure.sharpness else ""
    return f"{_table(['Method', *(head for head, _ in shown.values())], lines)}\n\n{MEASURED} {flatness}".rstrip()


def _published(every_row: Sequence[Row], splits: Sequence[str]) -> str:
    """The table of a file without runs: the paper's numbers alone, a column for each split."""
    numbers: dict[str, dict[str, str]] = {}
    for row in every_row:
        if row.published is not None:
            numbers.setdefault(row.label, {})[row.split] = f"{100 * row.published:.2f}"
    lines = [[label, *(by_split.get(split, NOTHING) for split in splits)] for label, by_split in numbers.items()]
    table = f"{_table(['Method', *splits], lines)}\n\n" if lines else ""
    return f"{table}No run yet{': the numbers are the published accuracies' if lines else ''}."


def _is_shown(row: Row) -> bool:
    """Whether a row has a number of its own or of a paper, or waits for the search."""
    return bool(row.seeds) or row.published is not None or row.choice is None


def _first(compared: Sequence[Row], criterion: Criterion) -> str:
    """The sentence about the best row and the next one; empty while a row has no result."""
    ranks = ranked(compared, criterion)
    if len(ranks) < 2 or any(row.last is None and not row.diverged for row in compared):
        return ""
    first, second = ranks[:2]
    difference = paired(first, second)
    if difference is None or difference.standard_error is None:
        return ""
    return (
        f"First is {first.label}, then {second.label}: {_difference(difference, criterion.metric)}, paired over "
        f"{difference.count} seeds."
    )


def _difference(spread: Spread | None, metric: str) -> str:
    """A paired difference with its standard error, of an accuracy in points."""
    if spread is None:
        return NOTHING
    scale, digits = (100.0, ".2f") if in_percent(metric) else (1.0, ".3g")
    error = spread.standard_error
    return f"{scale * spread.mean:+{digits}}" + ("" if error is None else f" ± {scale * error:{digits}}")


def _search(plan: Plan, tuning: TuningSection, criterion: Criterion, split: str) -> str:
    metric = criterion.metric
    experiments = [experiment for experiment in plan.experiments if experiment.experiment[1:] == (split, criterion)]
    searches = [(experiment, tried(plan, experiment)) for experiment in experiments]
    rates = sorted(
        {*tuning.learning_rates, *(setting.choice.learning_rate for _, group in searches for setting in group)}
    )
    lines = []
    for experiment, group in searches:
        cells: dict[str, dict[float, str]] = {}
        for setting in group:
            row = cells.setdefault(parameters_text(setting.choice.own), {})
            row[setting.choice.learning_rate] = (
                f"**{_tried(setting, metric)}**" if setting.choice == experiment.choice else _tried(setting, metric)
            )
        label = experiment.experiment.method.label
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


def _tried(setting: Tried, metric: str) -> str:
    text = _share(setting.validation, metric)
    if not setting.judged:
        return text
    finite = [value for value in setting.judged if value is not None]
    return f"{text} ({_share(fmean(finite) if len(finite) == len(setting.judged) else None, metric)})"


def _share(value: float | None, metric: str) -> str:
    if value is None:
        return "diverged"
    return f"{100 * value:.1f}" if in_percent(metric) else f"{value:.4g}"


def _spread(spread: Spread | None, metric: str) -> str:
    """Mean and deviation, of an accuracy in percent."""
    if spread is None:
        return NOTHING
    if not in_percent(metric):
        return f"{spread.mean:.4g}" + ("" if spread.deviation is None else f" ± {spread.deviation:.2g}")
    return f"{100 * spread.mean:.2f}" + ("" if spread.deviation is None else f" ± {100 * spread.deviation:.2f}")


def _pair(down: Spread | None, up: Spread | None) -> str:
    return f"{down.mean:.0f} / {up.mean:.0f}" if down and up else NOTHING


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", "---", *["--:"] * (len(heads) - 2)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *lines])
