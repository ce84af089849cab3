"""Reads a table file: the settings that all runs share, and the methods, splits and seeds to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from algorithms import AlgorithmError, build
from fl_common.settings import Section, describe_error, parse_toml, validated
from fl_extensions.methods import load_method
from fl_ops.compare.cells import ACCURACY, Choice, in_percent
from fl_ops.errors import UsageError
from fl_ops.simulate.settings import SimulationSection
from fl_server.aggregation.methods import check_schedules
from fl_server.errors import InvalidInput
from fl_server.rounds.metrics import AVERAGED, Criterion, Directions, of_averaged
from fl_server.run_settings.config import RunConfig, ScheduleSection
from fl_server.run_settings.privacy import PrivacySection, without_relative_limits
from fl_server.run_settings.sections import OF_COHORTS, LocalSection, RoundSection
from fl_server.run_settings.spec import from_values
from fl_tasks import TaskError

Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Scalar = float | str | bool
CLIPPING = "max_gradient_norm"
"""The one key of [local] besides the rate that a search may choose."""


class MethodSection(Section):
    """One row of the table."""

    label: str = Field(min_length=1)
    """The method's name in tables and plots."""
    name: str
    """The algorithm's name, as in a run's [algorithm]."""
    parameters: dict[str, Scalar] = Field(default_factory=dict)
    """Fixed parameters, which are not searched."""
    tune: dict[str, list[Scalar]] = Field(default_factory=dict)
    """Parameters to search with their values, in all combinations. A narrow search starts with the first values.
    max_gradient_norm is that of [local]; 0 is no clipping."""
    learning_rates: list[Rate] | None = Field(default=None, min_length=1)
    """Learning rates to try for this method instead of those of [tuning]."""
    local: dict[str, Any] = Field(default_factory=dict)
    """Keys of [local] that differ for this method, such as max_gradient_norm or learning_rate_decay."""
    round: dict[str, Any] = Field(default_factory=dict)
    """Keys of [round] that differ for this method, such as clients_per_round."""
    privacy: dict[str, Any] = Field(default_factory=dict)
    """The section [privacy] of this method's runs; empty: none."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task that differ for this method, such as augment."""
    splits: list[str] | None = Field(default=None, min_length=1)
    """The splits that this section is for, by default all. Sections for different splits may have the same label."""
    published: dict[str, Share] = Field(default_factory=dict)
    """Accuracy in a paper by split, as a share of 1, for the column "published" of the tables."""
    schedules: dict[str, ScheduleSection] = Field(default_factory=dict)
    """Schedules as in a run's [algorithm.schedules.NAME]. The value, searched or not, is that of round 0."""

    def variants(self, learning_rate: float) -> list[Choice]:
        """Every combination of the values to search, at this rate; the one of the first values first."""
        variants = []
        for combination in product(*self.tune.values()):
            own = dict(zip(self.tune, combination, strict=True))
            clipping = {CLIPPING: own.pop(CLIPPING)} if CLIPPING in own else {}
            variants.append(Choice(learning_rate, self.parameters | own, self.local | clipping, self.options))
        return variants


class TuningSection(Section):
    """How the learning rate and the parameters of each method are chosen, without the test set and the final seeds."""

    learning_rates: list[Rate] = Field(min_length=1)
    """Learning rates to try for every method that has none of its own."""
    extend: int = Field(default=2, ge=0, le=10)
    """If the lowest or highest rate is the best, try the next one beyond it, by the ratio of the two rates at that
    edge; at most so often at each edge."""
    seed: int = Field(ge=0)
    """Seed of the partition, the first model and the cohorts of the search; none of the final seeds."""
    rounds: int = Field(ge=1)
    """Rounds of each run of the search."""
    judge_seeds: list[int] = Field(default_factory=list)
    """Seeds under which the best settings of the search run again with all rounds, on the validation data; the highest
    mean is chosen, and a setting that diverges under one of them loses. At least two, none of the final seeds. Empty:
    the short runs decide."""
    near: float = Field(default=0.01, ge=0, lt=1)
    """Settings of the search whose accuracy is within so much of the best one are judged."""
    validation_every: int = Field(default=6, ge=0)
    """Withhold one in so many TRAINING examples of each class from the clients, to evaluate the search. 0: none, and
    the search has the data of the final runs, for a problem whose optimum is known."""
    search: Literal["grid", "narrow", "climb"] = "grid"
    """"grid": every rate with every combination. "narrow": the rates with the first combination, then the combinations
    at the best rate, then the rates again if another combination is better. "climb": the rates with the first
    combination, then the neighbours of the best setting, which differ from it in one value, until `cells` have run."""
    cells: int | None = Field(default=None, ge=1)
    """Runs of the search of each method, with search = "climb": every method gets as many."""


class ReportSection(Section):
    """Settings of the summary."""

    metric: str = Field(default=ACCURACY, min_length=1)
    """Metric of the evaluations by which settings are chosen and methods are compared: of the server's, or of the
    clients', such as clients_accuracy where the server has no examples."""
    lower_is_better: bool | None = None
    """Direction of that metric. None: that of a name which everybody reads alike, such as mae."""
    target: float | None = None
    """Target of the metric: the summary has the rounds and bytes until it is first reached."""
    last: int = Field(default=10, ge=1)
    """Number of last evaluations to average, for the choice and for the comparison."""
    also: list[str] = Field(default_factory=list)
    """Further metrics of the evaluation. Each has a choice of settings and a table of its own, by the same rules; runs
    that several of them need are made once. A direction that is not known is that of `metric`. With the section
    [averaging], the metric of the averaged model, such as averaged_accuracy, is always one of them."""
    baseline: str = ""
    """Label of a method: the tables have the paired difference of each other method to it, over the same seeds, with
    its standard error."""

    @property
    def criterion(self) -> Criterion:
        """The metric and its direction. Raises ValueError if the direction is unknown."""
        known = Directions().lower_is_better(self.metric) if self.lower_is_better is None else self.lower_is_better
        if known is None:
            raise ValueError(
                f"report: expected lower_is_better = true or false with the metric {self.metric!r}, got none"
            )
        return Criterion(self.metric, known)

    def target_of(self, metric: str) -> float | None:
        """The target, for this metric and for further ones of its kind: accuracies."""
        return self.target if metric == self.metric or (in_percent(self.metric) and in_percent(metric)) else None

    @property
    def criteria(self) -> list[Criterion]:
        """The metric and the further ones, with their directions."""
        first = self.criterion
        known = ((metric, Directions().lower_is_better(metric)) for metric in self.also)
        return [first, *(Criterion(name, first.lower_is_better if low is None else low) for name, low in known)]


class TableSection(Section):
    """The keys of a table file that a run's file does not have."""

    simulation: SimulationSection = SimulationSection()
    """The keys of a file for `fl simulate`, without the keys that splits and tuning set."""
    seeds: list[int] = Field(min_length=1)
    """Seeds of the final runs, with the chosen setting, evaluated on the test set."""
    splits: dict[str, dict[str, Any]] = Field(min_length=1)
    """Data splits by name; each is a table as simulation.partition."""
    methods: list[MethodSection] = Field(min_length=1)
    tuning: TuningSection | None = None
    report: ReportSection = ReportSection()


class Experiment(NamedTuple):
    """A method on a split: tuned once by one metric, and summarised in one row."""

    method: MethodSection
    split: str
    criterion: Criterion


@dataclass(frozen=True)
class Table:
    """A checked table file. run: the settings that all cells share; spec: the comparison."""

    name: str
    run: RunConfig
    spec: TableSection
    engine: Mapping[str, Any] = field(default_factory=dict)
    """The arithmetic of an engine whose bits are not the coordinator's; it is a setting of every cell."""

    @property
    def labels(self) -> list[str]:
        """The labels of the methods, each once."""
        return list(dict.fromkeys(method.label for method in self.spec.methods))

    def experiments(self) -> Iterator[Experiment]:
        """Every method on every split by every metric, metric by metric and split by split."""
        for criterion, split in product(self.spec.report.criteria, self.spec.splits):
            methods = [method for method in self.spec.methods if split in (method.splits or [split])]
            yield from (Experiment(method, split, criterion) for method in methods)

    def simulation(self, split: str, validation_every: int = 0) -> SimulationSection:
        """The clients of a split. validation_every: see TuningSection; 0 withholds nothing."""
        changes = {"partition": self.spec.splits[split], "validation_every": validation_every}
        return SimulationSection.model_validate({**self.spec.simulation.model_dump(exclude_unset=True), **changes})

    def first_choice(self, method: MethodSection) -> Choice:
        """The setting of a method that is not tuned, and the start of a search."""
        return method.variants(method.local.get("learning_rate", self.run.local.learning_rate))[0]

    def local(self, choice: Choice) -> dict[str, Any]:
        """The section [local] of a run with this setting, as plain values. Raises ValueError, also for unknown keys."""
        amount = choice.local.keys() & {"epochs", "steps"}
        shared = self.run.local.model_dump(mode="json", exclude={"epochs", "steps"} if amount else None)
        values = {**shared, **choice.local, "learning_rate": choice.learning_rate}
        return LocalSection.model_validate(values).model_dump(mode="json")

    def round(self, method: MethodSection) -> dict[str, Any]:
        """The section [round] of a method's runs, as plain values. Raises ValueError, also for unknown keys."""
        values = self.run.round.model_dump(mode="json")
        own = without_relative_limits({"privacy": method.privacy or None, "round": method.round})["round"]
        if own.get("close") == "buffer":  # it has no cohorts
            values = {name: value for name, value in values.items() if name not in OF_COHORTS}
        return RoundSection.model_validate({**values, **own}).model_dump(mode="json")


def read_table(path: Path) -> Table:
    """Read a table file. Raises UsageError, which names the file and the key."""
    try:
        content = parse_toml(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}: expected a comparison's table in TOML") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from None
    try:
        return _table(path.stem, content)
    except ValidationError as error:
        raise UsageError(
            f"{path}: {'; '.join(describe_error(detail, TableSection) for detail in error.errors())}"
        ) from None
    except (InvalidInput, AlgorithmError, TaskError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None


def _table(name: str, content: dict[str, Any]) -> Table:
    spec = validated({key: content[key] for key in TableSection.model_fields.keys() & content.keys()}, TableSection)
    run = {key: value for key, value in content.items() if key not in TableSection.model_fields}
    for key, instead in (("algorithm", "[[methods]]"), ("seed", "seeds and tuning.seed")):
        if key in run:
            raise ValueError(f"{key}: a table has {instead} instead")
    table = _with_averaged_metric(Table(name, from_values(run), spec))
    _check(table)
    return table


def _with_averaged_metric(table: Table) -> Table:
    """The table that compares the averaged models too, if its runs have any: settings are chosen for each apart."""
    report = table.spec.report
    averaged = f"{AVERAGED}{report.metric}"
    if table.run.averaging is None or of_averaged(report.metric) or averaged in report.also:
        return table
    report = report.model_copy(update={"also": [*report.also, averaged]})
    return replace(table, spec=table.spec.model_copy(update={"report": report}))


def _check(table: Table) -> None:
    spec = table.spec
    _check_report(spec)
    _check_averaging(table)
    rows = Counter(
        (experiment.method.label, experiment.split, experiment.criterion) for experiment in table.experiments()
    )
    if twice := {label for (label, _, _), count in rows.items() if count > 1}:
        raise ValueError(
            f"methods: expected a different label for each method, got {', '.join(sorted(twice))} more than once"
        )
    _check_seeds(spec)
    for method in spec.methods:
        _check_method(table, method)
    if spec.simulation.model_fields_set & {"partition", "validation_every"}:
        raise ValueError("simulation: expected neither partition nor validation_every: splits and tuning set them")
    for split in spec.splits:
        if (section := table.simulation(split)).folders is None:
            section.partition_spec(0)


def _check_report(spec: TableSection) -> None:
    report, labels = spec.report, [method.label for method in spec.methods]
    metrics = [criterion.metric for criterion in report.criteria]
    if twice := next((name for name, count in Counter(metrics).items() if count > 1), ""):
        raise ValueError(f"report.also: expected each metric once, and not report.metric; got {twice} again")
    if report.baseline and report.baseline not in labels:
        raise ValueError(f"report.baseline: expected a label of the table, got {report.baseline!r}")
    if in_percent(report.metric) and report.target is not None and not 0 < report.target < 1:
        raise ValueError(f"report.target: expected an accuracy over 0 and under 1, got {report.target:g}")
    if spec.tuning and spec.tuning.validation_every == 1:
        raise ValueError(
            "tuning.validation_every: expected 0, for none, or 2 or more, got 1: clients would hold nothing"
        )
    if spec.tuning and (spec.tuning.cells is not None) != (spec.tuning.search == "climb"):
        raise ValueError('tuning.cells: expected the number of runs with search = "climb", and none otherwise')


def _check_averaging(table: Table) -> None:
    averaging, tuning = table.run.averaging, table.spec.tuning
    named = [criterion.metric for criterion in table.spec.report.criteria if of_averaged(criterion.metric)]
    if averaging is None:
        if named:
            raise ValueError(f"report: expected the section [averaging] with the metric {named[0]!r}, got none")
    elif averaging.start is not None and tuning and averaging.start >= tuning.rounds:
        raise ValueError(
            f"averaging.start: expected less than tuning.rounds ({tuning.rounds}), got {averaging.start}: the runs of"
            " the search would end without an averaged model"
        )


def _check_seeds(spec: TableSection) -> None:
    if len(set(spec.seeds)) < len(spec.seeds) or (spec.tuning and spec.tuning.seed in spec.seeds):
        raise ValueError("seeds: expected each seed once, and not tuning.seed: the search must not use the final seeds")
    judges = spec.tuning.judge_seeds if spec.tuning else []
    if judges and (len(judges) < 2 or len(set(judges)) < len(judges) or set(judges) & set(spec.seeds)):
        raise ValueError(
            "tuning.judge_seeds: expected two or more different seeds, "
            f"none of the final ones {spec.seeds}, got {judges}"
        )


def _check_method(table: Table, method: MethodSection) -> None:
    """Build every variant now: an error must not come after hours of runs."""
    where = f"methods.{method.label}"
    if (method.tune or method.learning_rates) and table.spec.tuning is None:
        raise ValueError(f"{where}: has values to tune, so the table needs a section [tuning]")
    if table.spec.tuning and "learning_rate" in method.local:
        raise ValueError(f"{where}.local: the search sets learning_rate; use learning_rates for this method's values")
    if unknown := sorted({*(method.splits or []), *method.published} - table.spec.splits.keys()):
        raise ValueError(f"{where}: expected splits of this table, {', '.join(table.spec.splits)}; got {unknown[0]}")
    load_method(method.name)
    with _named(f"{where}, values of [round]", RoundSection):
        table.round(method)
    if method.privacy:
        with _named(f"{where}, values of [privacy]", PrivacySection):
            PrivacySection.model_validate(method.privacy)
    for variant in method.variants(table.first_choice(method).learning_rate):
        check_schedules(method.schedules, build(method.name, **variant.parameters), table.run.horizon)
        with _named(f"{where}, values of [local]", LocalSection):
            table.local(variant)


@contextmanager
def _named(where: str, section: type[BaseModel]) -> Iterator[None]:
    """The first wrong key of a section as ValueError, after `where`."""
    try:
        yield
    except ValidationError as error:
        raise ValueError(f"{where}: {describe_error(error.errors()[0], section)}") from None
