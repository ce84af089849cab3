"""Decides which cells of a comparison to run next, from the finished ones, so that it can be stopped at any time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from algorithms import build
from fl_ops.compare import tuning
from fl_ops.compare.cells import Cell, CellResult, Choice, Stage, rounds_of
from fl_ops.compare.table import Experiment, Table
from fl_ops.compare.tuning import Trial
from fl_ops.errors import UsageError
from fl_server.rounds.metrics import on_server

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
    run |= {"seed": seed, "algorithm": algorithm, "local": table.local(choice), "round": table.round(experiment.method)}
    if experiment.method.privacy:
        run["privacy"] = dict(experiment.method.privacy)
    options = run["task"]["options"] | choice.options
    run["task"]["options"] = {key: value for key, value in options.items() if key not in DATA_LOCATION}
    tuned = spec.tuning if stage != "final" else None
    if tuned and stage == "tuning":
        run["stop"]["rounds"] = tuned.rounds
    if not table.run.stops_by_metric:
        # The name is checked before the first round, against those that the task reports.
        criterion = spec.report.criterion
        run["stop"] |= {"metric": criterion.metric, "lower_is_better": criterion.lower_is_better}
    simulation = table.simulation(experiment.split, tuned.validation_every if tuned else 0)
    if tuned and tuned.validation_every and not run["evaluation"]["every"]:  # only the server has the validation data
        run["evaluation"]["every"] = run["evaluation"]["clients_every"]
    if stage != "final":  # the search reads evaluations only
        simulation = simulation.model_copy(update={"measure": None})
    settings: dict[str, Any] = {"run": run, "simulation": simulation.model_dump(mode="json")}
    if table.engine:
        settings["engine"] = dict(table.engine)
    return Cell(experiment.method.label, experiment.split, stage, seed, settings)


class Done(NamedTuple):
    """A finished cell and what it gave."""

    choice: Choice
    cell: Cell
    result: CellResult


class ExperimentPlan:
    """The progress of one method on one split: its search, its choice and its final runs."""

    def __init__(self, table: Table, experiment: Experiment, find: FindResult) -> None:
        """find: returns the result of a cell with all its metrics."""
        self.experiment = experiment
        self._table = table
        self._find_all = find
        self._search = tuning.search(experiment.method, table.spec.tuning) if table.spec.tuning else None
        self._asked = next(self._search) if self._search else []
        self._answered: list[Trial] = []
        self._choice = None if self._search else table.first_choice(experiment.method)

    @property
    def choice(self) -> Choice | None:
        """The setting that tuning chose; None before the search has ended."""
        self._advance()
        return self._choice

    @property
    def at_edge(self) -> bool:
        """The chosen rate is the lowest or the highest that was tried: the grid was extended as often as allowed."""
        spec = self._table.spec.tuning
        if spec is None or (choice := self.choice) is None:
            return False
        grid = self.experiment.method.learning_rates or spec.learning_rates
        return tuning.at_edge(choice, [trial.choice for trial in self._answered], grid)

    def missing(self) -> list[Cell]:
        """The cells that can be run now."""
        cells = self._final_cells() if self.choice else [self._trial_cell(trial) for trial in self._asked]
        return [cell for cell in cells if self._find(cell) is None]

    def searched(self) -> list[tuple[Trial, CellResult]]:
        """The finished runs of the search."""
        trials = self._answered if self.choice else [*self._answered, *self._asked]
        results = ((trial, self._find(self._trial_cell(trial))) for trial in trials)
        return [(trial, result) for trial, result in results if result is not None]

    def finals(self) -> dict[int, CellResult]:
        """Results of the finished final runs, by seed."""
        results = ((cell.seed, self._find(cell)) for cell in self._final_cells())
        return {seed: result for seed, result in results if result is not None}

    def done(self) -> list[Done]:
        """All finished cells: those of the search, then the final ones by seed."""
        cells = [(trial.choice, self._trial_cell(trial)) for trial, _ in self.searched()]
        if choice := self.choice:
            cells += [(choice, cell) for cell in self._final_cells()]
        return [Done(choice, cell, result) for choice, cell in cells if (result := self._find(cell))]

    def left(self) -> tuple[int, int]:
        """Expected numbers of (cells, rounds) that are not done; exact once the search has ended."""
        spec, all_rounds = self._table.spec.tuning, self._table.run.stop.rounds
        finals = len(self._table.spec.seeds) - len(self.finals())
        if spec is None or self.choice:
            return finals, finals * all_rounds
        stages = Counter(trial.stage for trial, _ in self.searched())
        missing = Counter(cell.stage for cell in self.missing())
        usual = {"tuning": tuning.usual_trials(self.experiment.method, spec), "judging": tuning.usual_judged(spec)}
        if missing["judging"]:
            usual["tuning"] = 0
        short, long = (max(missing[stage], usual[stage] - stages[stage]) for stage in ("tuning", "judging"))
        return finals + short + long, short * spec.rounds + (finals + long) * all_rounds

    def final_settings(self) -> dict[str, Any]:
        """All settings of the final runs, with the first seed; empty before the choice."""
        return next((dict(cell.settings) for cell in self._final_cells()), {})

    def _advance(self) -> None:
        while self._choice is None and self._search is not None:
            results = [self._find(self._trial_cell(trial)) for trial in self._asked]
            known = [result for result in results if result is not None]
            if len(known) < len(results):
                return
            self._answered += self._asked
            last, criterion = self._table.spec.report.last, self.experiment.criterion
            if lacks := next(filter(None, (result.without(self._searched_metric) for result in known)), ""):
                raise UsageError(f"the search cannot compare settings. {lacks}")
            scores = [tuning.score(result, last, criterion) for result in known]
            try:
                self._asked = self._search.send(scores)
            except StopIteration as ended:
                self._choice = ended.value

    def _find(self, cell: Cell) -> CellResult | None:
        result = self._find_all(cell)
        return result and result.by(
            self.experiment.criterion.metric if cell.stage == "final" else self._searched_metric
        )

    @property
    def _searched_metric(self) -> str:
        """The metric that the search compares: of clients' test examples it takes that of the validation examples."""
        metric, tuning = self.experiment.criterion.metric, self._table.spec.tuning
        withheld = tuning is not None and tuning.validation_every
        return on_server(metric) if withheld else metric

    def _trial_cell(self, trial: Trial) -> Cell:
        return cell_of(self._table, self.experiment, *trial)

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
        labels = table.labels
        if unknown := [label for label in only if label not in labels]:
            raise UsageError(f"--only: expected labels of the table, {', '.join(labels)}; got {', '.join(unknown)}")
        self.table = table
        self._load = load
        self._known: dict[str, CellResult] = {}
        experiments = [experiment for experiment in table.experiments() if not only or experiment.method.label in only]
        self.experiments = [ExperimentPlan(table, experiment, self.find) for experiment in experiments]

    def missing(self, seconds: Callable[[Cell], float] = rounds_of) -> list[Cell]:
        """The cells that can be run now, the most urgent first: the search, then seed by seed; of these the longest.

        seconds: the expected time of a cell; only the order of the times matters.
        """
        seeds = self.table.spec.seeds
        cells = [cell for experiment in self.experiments for cell in experiment.missing()]
        urgency = {cell.digest: seeds.index(cell.seed) if cell.stage == "final" else -1 for cell in cells}
        return sorted(cells, key=lambda cell: (urgency[cell.digest], -seconds(cell)))

    def find(self, cell: Cell) -> CellResult | None:
        """The result of a cell, or None."""
        if cell.digest not in self._known and (result := self._load(cell)) is not None:
            self._known[cell.digest] = result
        return self._known.get(cell.digest)

    def done(self) -> int:
        """Number of finished cells."""
        return len(self.done_once())

    def done_once(self) -> list[Done]:
        """All finished cells, each once, with all metrics of their results."""
        done_by_digest = {done.cell.digest: done for planned in self.experiments for done in planned.done()}
        return [done._replace(result=self._known[digest]) for digest, done in done_by_digest.items()]

    def results(self) -> list[tuple[Cell, CellResult]]:
        """All finished cells, each once, with their results."""
        return [(done.cell, done.result) for done in self.done_once()]

    def left(self) -> tuple[int, int]:
        """Expected numbers of (cells, rounds) that are not done."""
        left = self.left_of_each().values()
        return sum(cells for cells, _ in left), sum(rounds for _, rounds in left)

    def left_of_each(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(label, split) -> expected (cells, rounds). Metrics are expected to need the same runs of a method."""
        left: dict[tuple[str, str], tuple[int, int]] = {}
        for planned in self.experiments:
            key = planned.experiment.method.label, planned.experiment.split
            left[key] = max(left.get(key, (0, 0)), planned.left())
        return left
