"""One row of a comparison, a method on a split: its search, its choice, and the runs that judge it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from algorithms import build
from fl_ops.compare import tuning
from fl_ops.compare.cells import Cell, CellResult, Choice, Stage
from fl_ops.compare.table import Line, Table

_NO_MATTER = {"name", "labels", "keep_checkpoints"}
"""Fields of a run that do not touch its numbers."""
PLACES = ("data_root", "download")
"""Options of a task that say where its data lie, not what they are."""


def cell_of(table: Table, line: Line, choice: Choice, stage: Stage, seed: int) -> Cell:
    """The run of a method on a split with a setting and a seed."""
    own, run = table.own, table.run.model_dump(mode="json", exclude=_NO_MATTER)
    parameters = dict(build(line.method.name, **choice.parameters).parameters)
    run |= {"seed": seed, "algorithm": {"name": line.method.name, "parameters": parameters}}
    run["local"]["learning_rate"] = choice.learning_rate
    run["task"]["options"] = {key: value for key, value in run["task"]["options"].items() if key not in PLACES}
    tuned = own.tuning if stage == "tuning" else None
    if tuned:
        run["stop"]["rounds"] = tuned.rounds
    simulation = table.simulation(line.split, tuned.validation_every if tuned else 0)
    settings = {"run": run, "simulation": simulation.model_dump(mode="json")}
    return Cell(line.method.label, line.split, stage, seed, settings)


class Done(NamedTuple):
    """A cell that has a result."""

    choice: Choice
    cell: Cell
    result: CellResult


class LinePlan:
    """How far a line has come, told from the results there are. find: the result of a cell, or None."""

    def __init__(self, table: Table, line: Line, find: Callable[[Cell], CellResult | None]) -> None:
        self.line = line
        self._table = table
        self._find = find
        self._search = tuning.search(line.method, table.own.tuning) if table.own.tuning else None
        self._asked = next(self._search) if self._search else []
        self._tried: list[Choice] = []
        self._choice = None if self._search else table.first_choice(line.method)

    @property
    def choice(self) -> Choice | None:
        """What tuning chose; None before it has."""
        self._advance()
        return self._choice

    def missing(self) -> list[Cell]:
        """The cells that can be run now."""
        cells = self._final_cells() if self.choice else [self._tuning_cell(choice) for choice in self._asked]
        return [cell for cell in cells if self._find(cell) is None]

    def tried(self) -> list[tuple[Choice, CellResult]]:
        """What tuning has tried."""
        open_ = [] if self.choice else [choice for choice in self._asked if choice not in self._tried]
        results = ((choice, self._find(self._tuning_cell(choice))) for choice in [*self._tried, *open_])
        return [(choice, result) for choice, result in results if result is not None]

    def finals(self) -> dict[int, CellResult]:
        """The judging runs that are done, by seed."""
        results = ((cell.seed, self._find(cell)) for cell in self._final_cells())
        return {seed: result for seed, result in results if result is not None}

    def done(self) -> list[Done]:
        """Every cell of this line that has a result: those of the search, then the judging ones by seed."""
        cells = [(choice, self._tuning_cell(choice)) for choice, _ in self.tried()]
        if choice := self.choice:
            cells += [(choice, cell) for cell in self._final_cells()]
        return [Done(choice, cell, result) for choice, cell in cells if (result := self._find(cell))]

    def left(self) -> tuple[int, int]:
        """(cells, rounds) that are not done, at most."""
        finals = len(self._table.own.seeds) - len(self.finals())
        untried, rounds = 0, 0
        if self._table.own.tuning and not self.choice:
            untried = tuning.most_tried(self.line.method, self._table.own.tuning) - len(self.tried())
            rounds = untried * self._table.own.tuning.rounds
        return finals + untried, rounds + finals * self._table.run.stop.rounds

    def final_settings(self) -> dict[str, Any]:
        """Everything that decides the judging runs, but for the seed; empty before the choice."""
        return next((dict(cell.settings) for cell in self._final_cells()), {})

    def _advance(self) -> None:
        while self._choice is None and self._search is not None:
            results = [self._find(self._tuning_cell(choice)) for choice in self._asked]
            known = [result for result in results if result is not None]
            if len(known) < len(results):
                return
            self._tried += [choice for choice in self._asked if choice not in self._tried]
            try:
                self._asked = self._search.send([tuning.score(each, self._table.own.report.last) for each in known])
            except StopIteration as ended:
                self._choice = ended.value

    def _tuning_cell(self, choice: Choice) -> Cell:
        seed = self._table.own.tuning.seed if self._table.own.tuning else 0
        return cell_of(self._table, self.line, choice, "tuning", seed)

    def _final_cells(self) -> list[Cell]:
        if not (choice := self.choice):
            return []
        return [cell_of(self._table, self.line, choice, "final", seed) for seed in self._table.own.seeds]
