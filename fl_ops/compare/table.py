"""A table file: a run's settings for all, and what is compared in it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from algorithms import AlgorithmError, build
from fl_ops.compare.cells import Choice
from fl_ops.errors import Misused
from fl_ops.simulate.settings import SimulationSection
from fl_server.errors import InvalidInput
from fl_server.run_config import RunConfig, from_values
from protos.settings import Section, in_words
from tasks import TaskError

Rate = Annotated[float, Field(gt=0)]
Scalar = float | str | bool


class MethodSection(Section):
    """One row of the table."""

    label: str = Field(min_length=1)
    """What it is called in tables and pictures."""
    name: str
    """As in a run's [algorithm]."""
    parameters: dict[str, Scalar] = Field(default_factory=dict)
    """Those that are given, not searched."""
    tune: dict[str, list[Scalar]] = Field(default_factory=dict)
    """Values to search for some parameters, every combination; the first of each is where a narrowing search starts."""

    def variants(self) -> list[dict[str, Scalar]]:
        """The parameters of every combination, the starting one first."""
        return [self.parameters | dict(zip(self.tune, each, strict=True)) for each in product(*self.tune.values())]


class TuningSection(Section):
    """How each method's learning rate and own parameters are chosen, without the test set and the reported seeds."""

    learning_rates: list[Rate] = Field(min_length=1)
    """The same for every method."""
    seed: int = Field(ge=0)
    """Deals the data, makes the first model, draws the cohorts; none of the reported seeds."""
    rounds: int = Field(ge=1)
    """Of each cell of the search."""
    validation_every: int = Field(default=6, ge=2)
    """One in so many TRAINING examples of each class is held by no client and judges the choice."""
    search: Literal["grid", "narrow"] = "grid"
    """"grid": every rate with every variant. "narrow": the rates with the first variant, the variants at the best rate,
    and the rates again if another variant won."""


class ReportSection(Section):
    """What the numbers of the summary are."""

    target: float | None = Field(default=None, gt=0, lt=1)
    """Accuracy whose first round and bytes are told."""
    last: int = Field(default=10, ge=1)
    """How many of the last evaluations are averaged, for the choice and for the comparison."""


class TableSection(Section):
    """What a table file has beside a run's own keys."""

    simulation: SimulationSection = SimulationSection()
    """As in a file of `fl simulate`, but for what splits and tuning say."""
    seeds: list[int] = Field(min_length=1)
    """Fresh ones, each run with the chosen setting and judged on the test set."""
    splits: dict[str, dict[str, Any]] = Field(min_length=1)
    """By name, what stands in simulation.partition."""
    methods: list[MethodSection] = Field(min_length=1)
    tuning: TuningSection | None = None
    report: ReportSection = ReportSection()


class Line(NamedTuple):
    """A method on a split: what is tuned once, and summarised in one row."""

    method: MethodSection
    split: str


@dataclass(frozen=True)
class Table:
    """A checked table file. run: the settings that all cells share."""

    name: str
    run: RunConfig
    own: TableSection

    def lines(self) -> Iterator[Line]:
        """Every method on every split, split by split."""
        for split in self.own.splits:
            yield from (Line(method, split) for method in self.own.methods)

    def simulation(self, split: str, validation_every: int = 0) -> SimulationSection:
        """The clients of a split. validation_every: see TuningSection; 0 is none."""
        changes = {"partition": self.own.splits[split], "validation_every": validation_every}
        return self.own.simulation.model_copy(update=changes)

    def first_choice(self, method: MethodSection) -> Choice:
        """The setting of a method that is not tuned, and where a search starts."""
        return Choice(self.run.local.learning_rate, method.variants()[0])


def read_table(path: Path) -> Table:
    """The comparison that a file describes. Raises Misused, which names file and key."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Misused(f"there is no file {path}: expected a comparison's table in TOML") from None
    except (OSError, ValueError) as error:
        raise Misused(f"{path} cannot be read as TOML: {error}") from None
    try:
        return _table(path.stem, content)
    except ValidationError as error:
        raise Misused(f"{path}: {'; '.join(in_words(detail, TableSection) for detail in error.errors())}") from None
    except (InvalidInput, AlgorithmError, TaskError, ValueError) as error:
        raise Misused(f"{path}: {error}") from None


def _table(name: str, content: dict[str, Any]) -> Table:
    own = TableSection.model_validate({key: content[key] for key in TableSection.model_fields.keys() & content.keys()})
    run = {key: value for key, value in content.items() if key not in TableSection.model_fields}
    for key, instead in (("algorithm", "[[methods]]"), ("seed", "seeds and tuning.seed")):
        if key in run:
            raise ValueError(f"{key}: a table has {instead} instead")
    table = Table(name, from_values(run), own)
    _check(table)
    return table


def _check(table: Table) -> None:
    own = table.own
    labels = [method.label for method in own.methods]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise ValueError(f"methods: expected labels of one method each, got {', '.join(sorted(twice))} more than once")
    if len(set(own.seeds)) < len(own.seeds) or (own.tuning and own.tuning.seed in own.seeds):
        raise ValueError("seeds: expected different ones, and none of them tuning.seed: what chose must not judge")
    for method in own.methods:
        if method.tune and own.tuning is None:
            raise ValueError(f"methods.{method.label}: has values to tune over, so the table needs a section [tuning]")
        for variant in method.variants():
            build(method.name, **variant)  # refuses what cannot be, before anything is run
    if own.simulation.model_fields_set & {"partition", "validation_every"}:
        raise ValueError("simulation: expected neither partition nor validation_every: splits and tuning have them")
    for split in own.splits:
        table.simulation(split).partition_spec(0)
