"""Decides which cells of a comparison to run next, from the finished ones, so that it can be stopped at any time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from algorithms import build
from fl_ops.compare import tuning
from fl_ops.compare.cells import Cell, CellResult, Choice, Stage
from fl_ops.compare.table import Experiment, Table
from fl_ops.errors import UsageError

_IRRELEVANT = {"name", "labels", "keep_checkpoints", "owner"}
"""Fields of a run that do not change its numbers."""
DATA_LOCATION = ("data_root", "download")
"""Options of a task for the location of its data, which do not change them."""

FindResult = Callable[[Cell], CellResult | None]
"""Returns the result of a finished cell, or None."""


def cell_of(table: Table, experiment: Experiment, choice: Choice, stage: Stage, seed: int) -> Cell:
    """The run of a method on a split with a setting and a seed."""
    spec, run = table.spec, table.run.model_dump(mode="json", exclude=_IRRELEVANT)
    parameters = dict(build(experiment.method.name, **choice.parameters).parameters)
    algorithm: dict[str, Any] = {"name": experiment.method.name, "parameters": parameters}
    if experiment.method.schedules:
        algorithm["schedules"] = {
            name: section.model_dump(mode="json") for name, section in experiment.method.schedules.items()
        }
    run |= {"seed": seed, "algorithm": algorithm}
    run["local"]["learning_rate"] = choice.learning_rate
    options = run["task"]["options"]
    run["task"]["options"] = {key: value for key, value in options.items() if key not in DATA_LOCATION}
    tuned = spec.tuning if stage == "tuning" else None
    if tuned:
        run["stop"]["rounds"] = tuned.rounds
    simulation = table.simulation(experiment.split, tuned.validation_every if tuned else 0)
    settings = {"run": run, "simulation": simulation.model_dump(mode="json")}
    return Cell(experiment.method.label, experiment.split, stage, seed, settings)


class Done(NamedTuple):
    """A finished cell."""

    choice: Choice
    cell: Cell
    result: CellResult


class ExperimentPlan:
    """The progress of one method on one split: its search, its choice and its final runs."""

    def __init__(self, table: Table, experiment: Experiment, find: FindResult) -> None:
        self.experiment = experiment
        self._table = table
        self._find = find
        self._search = tuning.search(experiment.method, table.spec.tuning) if table.spec.tuning else None
        self._candidates = next(self._search) if self._search else []
        self._tried: list[Choice] = []
        self._choice = None if self._search else table.first_choice(experiment.method)

    @property
    def choice(self) -> Choice | None:
        """The setting that tuning chose; None before the search has ended."""
        self._advance()
        return self._choice

    def missing(self) -> list[Cell]:
        """The cells that can be run now."""
        cells = self._final_cells() if self.choice else [self._tuning_cell(choice) for choice in self._candidates]
        return [cell for cell in cells if self._find(cell) is None]

    def tried(self) -> list[tuple[Choice, CellResult]]:
        """The settings that tuning has tried, with their results."""
        current = [] if self.choice else [choice for choice in self._candidates if choice not in self._tried]
        results = ((choice, self._find(self._tuning_cell(choice))) for choice in [*self._tried, *current])
        return [(choice, result) for choice, result in results if result is not None]

    def finals(self) -> dict[int, CellResult]:
        """Results of the finished final runs, by seed."""
        results = ((cell.seed, self._find(cell)) for cell in self._final_cells())
        return {seed: result for seed, result in results if result is not None}

    def done(self) -> list[Done]:
        """All finished cells: those of the search, then the final ones by seed."""
        cells = [(choice, self._tuning_cell(choice)) for choice, _ in self.tried()]
        if choice := self.choice:
            cells += [(choice, cell) for cell in self._final_cells()]
        return [Done(choice, cell, result) for choice, cell in cells if (result := self._find(cell))]

    def left(self) -> tuple[int, int]:
        """Upper bounds of (cells, rounds) that are not done."""
        finals = len(self._table.spec.seeds) - len(self.finals())
        untried, rounds = 0, 0
        if self._table.spec.tuning and not self.choice:
            untried = tuning.most_tried(self.experiment.method, self._table.spec.tuning) - len(self.tried())
            rounds = untried * self._table.spec.tuning.rounds
        return finals + untried, rounds + finals * self._table.run.stop.rounds

    def final_settings(self) -> dict[str, Any]:
        """All settings of the final runs, with the first seed; empty before the choice."""
        return next((dict(cell.settings) for cell in self._final_cells()), {})

    def _advance(self) -> None:
        while self._choice is None and self._search is not None:
            results = [self._find(self._tuning_cell(choice)) for choice in self._candidates]
            known = [result for result in results if result is not None]
            if len(known) < len(results):
                return
            self._tried += [choice for choice in self._candidates if choice not in self._tried]
            scores = [tuning.score(each, self._table.spec.report.last) for each in known]
            try:
                self._candidates = self._search.send(scores)
            except StopIteration as ended:
                self._choice = ended.value

    def _tuning_cell(self, choice: Choice) -> Cell:
        seed = self._table.spec.tuning.seed if self._table.spec.tuning else 0
        return cell_of(self._table, self.experiment, choice, "tuning", seed)

    def _final_cells(self) -> list[Cell]:
        if not (choice := self.choice):
            return []
        return [cell_of(self._table, self.experiment, choice, "final", seed) for seed in self._table.spec.seeds]


class Plan:
    """All experiments of a table, with the results that are known.

    load: reads a cell's result if there is one; only: labels of the methods to run, all if empty. Raises UsageError for
    a label that the table does not have.
    """

    def __init__(self, table: Table, load: FindResult, only: Collection[str] = ()) -> None:
        labels = [method.label for method in table.spec.methods]
        if unknown := [label for label in only if label not in labels]:
            raise UsageError(f"--only: expected labels of the table, {', '.join(labels)}; got {', '.join(unknown)}")
        self.table = table
        self._load = load
        self._known: dict[str, CellResult] = {}
        experiments = [each for each in table.experiments() if not only or each.method.label in only]
        self.experiments = [ExperimentPlan(table, each, self.find) for each in experiments]

    def missing(self) -> list[Cell]:
        """The cells that can be run now, the most urgent first: tuning, then seed by seed."""
        seeds = self.table.spec.seeds
        cells = [cell for experiment in self.experiments for cell in experiment.missing()]
        return sorted(cells, key=lambda cell: seeds.index(cell.seed) if cell.stage == "final" else -1)

    def find(self, cell: Cell) -> CellResult | None:
        """The result of a cell, or None."""
        if cell.digest not in self._known and (found := self._load(cell)) is not None:
            self._known[cell.digest] = found
        return self._known.get(cell.digest)

    def done(self) -> int:
        """Number of finished cells."""
        return sum(len(experiment.done()) for experiment in self.experiments)

    def left(self) -> tuple[int, int]:
        """Upper bounds of (cells, rounds) that are not done."""
        each = [experiment.left() for experiment in self.experiments]
        return sum(cells for cells, _ in each), sum(rounds for _, rounds in each)
