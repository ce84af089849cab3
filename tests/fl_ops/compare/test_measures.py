"""What a comparison measures beyond evaluations, in its cells, files and tables: clients' statistics and sharpness."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_ops.compare import report, results
from fl_ops.compare.cells import Cell, CellFolder, CellResult, RoundRow
from fl_ops.compare.plan import Plan
from fl_ops.compare.run_cell import Means, RunCell
from fl_ops.compare.summary import rows
from fl_ops.errors import UsageError
from tests.fl_ops.compare.conftest import Reached, Read

SHARPNESS = "sharpness = { examples = 40, probes = 2, iterations = 5 }"
ON = ("simulation = { clients = 4 }", f"simulation = {{ clients = 4, measure = {{ every = 2, {SHARPNESS} }} }}")
UNTUNED = (
    ("tuning = { seed = 9, learning_rates = [0.1, 0.2, 0.4], rounds = 2, extend = 0 }\n", ""),
    ("tune = { alpha = [0.1, 0.3] }", ""),
)
NAMES = {
    *(f"clients_training_{metric}_{end}" for metric in ("accuracy", "loss") for end in ("mean", "std", "best_decile")),
    "hessian_largest", "hessian_trace", "sharpness",
}  # fmt: skip


def nothing_done(_: Cell) -> None:
    """No cell has a result."""


def ignore(_: RoundRow) -> None:
    """Nobody watches."""


def measured(result: CellResult) -> list[dict[str, float]]:
    """What each round measured."""
    return [dict(row.measured) for row in result.rounds]


def with_measures(result: CellResult, seed: int) -> CellResult:
    """A result whose last round has measures: a training deviation of 1 and 3 points under the seeds 1 and 2."""
    values = {"clients_training_accuracy_mean": 0.9, "clients_training_accuracy_std": 0.02 * seed - 0.01}
    of_clients = {"clients_accuracy_worst_decile": 0.25, "accuracy": 0.5}
    last = replace(result.rounds[-1], measured={**values, "hessian_largest": 10.0 * seed}, metrics=of_clients)
    return replace(result, rounds=(*result.rounds[:-1], last))


def test_a_cell_measures_and_keeps_it_through_a_stop(read: Read, tmp_path: Path) -> None:
    """Every second round and the last one; a cell that is stopped, saved and continued has the same numbers."""
    cell = Plan(read(*UNTUNED, ON), nothing_done).missing()[0]
    expected = RunCell()(cell, ignore, Means())
    assert [bool(values) for values in measured(expected)] == [False, True, True]
    assert measured(expected)[-1].keys() >= NAMES

    def stop(row: RoundRow) -> None:
        if row.round == 1:
            raise KeyboardInterrupt

    folder = CellFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        RunCell()(cell, stop, Means(saved=folder.saved(cell)))
    again: list[RoundRow] = []
    result = RunCell()(cell, again.append, Means(saved=folder.saved(cell)))
    assert [row.round for row in again] == [2]
    assert measured(result) == measured(expected)
    folder.save(cell, result)
    assert folder.load(cell) == result


def test_measures_change_no_other_number(read: Read) -> None:
    """The rounds of a cell are those of one without measures, whose file has no field for them."""
    on, off = (Plan(read(*UNTUNED, *change), nothing_done).missing()[0] for change in ((ON,), ()))
    plain = RunCell()(off, ignore, Means())
    same = [replace(row, measured={}, seconds=0.0) for row in RunCell()(on, ignore, Means()).rounds]
    assert same == [replace(row, seconds=0.0) for row in plain.rounds]
    assert not any("measured" in row for row in plain.as_json()["rounds"])


def test_the_search_measures_nothing(read: Read) -> None:
    """Its cells are those of a comparison without measures; the final ones are others."""

    def by_stage(*changes: tuple[str, str]) -> dict[str, set[str]]:
        plan = Plan(read(*changes), lambda cell: CellResult((), 0.0) if cell.stage == "tuning" else None)
        cells = [*(done.cell for done in plan.done_once()), *plan.missing()]
        return {stage: {cell.digest for cell in cells if cell.stage == stage} for stage in ("tuning", "final")}

    off, on = by_stage(), by_stage(ON)
    assert off["tuning"] == on["tuning"]
    assert len(on["tuning"]) > 3
    assert not off["final"] & on["final"]


def test_files_and_tables_have_a_column_for_what_was_measured(read: Read, reached: Reached) -> None:
    """Means and deviations over the seeds: 2 +- 1.41 points of deviation over clients; 15 +- 7.1 for the eigenvalue."""
    plan = Plan(read(*UNTUNED, ON), lambda cell: with_measures(reached(0.5, 0.6), cell.seed))
    spread = rows(plan)[0].measured["clients_training_accuracy_std"]
    assert (spread.mean, spread.deviation) == pytest.approx((0.02, 0.02 / 2**0.5))
    summary = next(csv.DictReader(io.StringIO(results.summary_csv(plan))))
    assert (summary["hessian_largest_mean"], summary["hessian_largest_seeds"]) == ("15.0", "2")
    first, last = [*csv.DictReader(io.StringIO(results.results_csv(plan)))][:2]
    assert (first["hessian_largest"], last["hessian_largest"]) == ("", "10.0")
    assert (first["clients_accuracy_worst_decile"], last["clients_accuracy_worst_decile"]) == ("", "0.25")
    heads = "| Method | train, mean | train, deviation | on clients, worst 10 % | largest eigenvalue |"
    text = report.tables(plan)
    assert f"### Over clients and flatness, accuracy, even\n\n{heads}" in text
    assert "| FedAvg | 90.00 ± 0.00 | 2.00 ± 1.41 | 25.00 ± 0.00 | 15 ± 7.1 |" in text
    assert "over 40 training examples of all clients (sample of seed 0)" in text
    facts: dict[str, Any] = json.loads(results.summary_json(plan))["rows"][0]
    assert facts["measured"]["hessian_largest"]["mean"] == 15.0


def test_without_measures_files_and_tables_have_no_such_column(read: Read, reached: Reached) -> None:
    """Their heads are those of before."""
    plan = Plan(read(*UNTUNED), lambda _: reached(0.5, 0.6))
    assert results.summary_csv(plan).splitlines()[0].endswith(",among_best,seconds_a_round")
    assert results.results_csv(plan).splitlines()[0].endswith(",bytes_down,bytes_up,seconds")
    assert "flatness" not in report.tables(plan)
    assert "measured" not in json.loads(results.summary_json(plan))["rows"][0]


def test_a_wrong_key_is_named(read: Read) -> None:
    """With its section."""
    with pytest.raises(UsageError, match=r"simulation\.measure\.sharpness"):
        read(
            ("simulation = { clients = 4 }", "simulation = { clients = 4, measure = { sharpness = { example = 1 } } }")
        )
