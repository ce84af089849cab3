"""One run of a comparison: its settings, its result, and the file that keeps both."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel

from fl_common.units import base_metric
from fl_ops.files import Target, written_whole
from fl_ops.simulate.settings import SimulationSection
from fl_server.rounds.metrics import PREFIX, by_clients
from fl_server.run_settings.config import AveragingSection, RunConfig, TaskSection

Stage = Literal["tuning", "judging", "final"]
"""tuning: a short run of the search; judging: a run of the search with all rounds; final: a reported run."""
ACCURACY = "accuracy"
"""The metric of a table that names none. It and its statistics over clients are shown in percent."""
_FORMAT = 1
"""Part of every digest. It changes if cells with the same written settings get other numbers, as by a new default."""
_CRITERION = ("metric", "lower_is_better")
"""Settings of [stop] by which a run selects its best round."""
_SAME_NUMBERS = {"evaluation": ("batch_size",)}
"""Settings of a run, by section, that change no model and no accuracy."""


def in_percent(metric: str) -> bool:
    """Whether a metric is a share of 1 that is shown in percent."""
    return base_metric(metric).endswith(ACCURACY)


@dataclass(frozen=True)
class Choice:
    """A setting of a method: its learning rate, its parameters, its keys of [local] and its options of the task."""

    learning_rate: float
    parameters: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def own(self) -> dict[str, Any]:
        """All but the rate, in one mapping: what the column "own parameters" of a report has."""
        return {**self.parameters, **self.local, **self.options}

    def at(self, learning_rate: float) -> Choice:
        """The same setting with another rate."""
        return replace(self, learning_rate=learning_rate)

    def equals_but_rate(self, other: Choice) -> bool:
        """Whether both have the same parameters, keys of [local] and options of the task."""
        return self.at(0) == other.at(0)


@dataclass(frozen=True)
class Cell:
    """One run. settings: everything that decides its numbers, as the plain values of a file for `fl simulate`."""

    label: str
    split: str
    stage: Stage
    seed: int
    settings: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        """The name of its file. A changed setting makes another cell; a changed label or data folder does not.

        Settings with their default values are not in it, so a later version that has more settings finds its cells.
        """
        text = json.dumps([_FORMAT, _decisive(self.settings)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _decisive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cell that decide its numbers and are not the default."""
    run = _without_defaults(settings["run"], _run_defaults())
    if "averaging" in run:  # the default is none, so its keys need defaults of their own
        run["averaging"] = _without_defaults(run["averaging"], _defaults(AveragingSection))
    stop = settings["run"].get("stop", {})
    rules = stop.get("target") is not None or bool(stop.get("patience"))
    # Without such a rule they only select the best round. With one, the metric counts although it is the default.
    own = {key: stop[key] for key in _CRITERION if rules and stop.get(key) is not None}
    if kept := {key: value for key, value in run.pop("stop", {}).items() if key not in _CRITERION} | own:
        run["stop"] = kept
    for section, keys in _SAME_NUMBERS.items():
        run[section] = {key: value for key, value in run.get(section, {}).items() if key not in keys}
    simulation = _without_defaults(settings["simulation"], _defaults(SimulationSection))
    return {**settings, "run": run, "simulation": simulation}


def _without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if key not in defaults:
            kept[key] = value
        elif isinstance(value, Mapping) and isinstance(defaults[key], Mapping):
            if inner := _without_defaults(value, defaults[key]):
                kept[key] = inner
        elif value != defaults[key]:
            kept[key] = value
    return kept


@cache
def _run_defaults() -> dict[str, Any]:
    # The name of the task has no default, and stays in each digest: no task has an empty name.
    return RunConfig(task=TaskSection.model_construct(name="")).model_dump(mode="json")


@cache
def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    fields = section.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}


def rounds_of(cell: Cell) -> int:
    """The most rounds that a cell has."""
    return int(cell.settings["run"]["stop"]["rounds"])


@dataclass(frozen=True)
class RoundRow:
    """One round. Accuracy and losses are None if nothing was evaluated or trained; bytes are tensor bytes."""

    round: int
    accepted: int
    training_loss: float | None
    accuracy: float | None
    loss: float | None
    bytes_down: int
    bytes_up: int
    seconds: float
    model: str | None
    """BLAKE3 digest of the model after the round; None if it was not taken."""
    simulated_total_s: float | None = None
    """Simulated time since the start of the run; None without [simulation.system]."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics of the evaluations by the server and by clients."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What the run measured beyond its evaluations; see [simulation.measure]."""

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values; `measured` only if there is any."""
        return {name: value for name, value in asdict(self).items() if name != "measured" or value}

    @property
    def measures(self) -> Mapping[str, float]:
        """`measured`, and the statistics over clients of their evaluations."""
        return {**{name: value for name, value in self.metrics.items() if by_clients(name)}, **self.measured}

    def by(self, metric: str) -> RoundRow:
        """The row with this metric in the place of the accuracy."""
        return self if metric == ACCURACY else replace(self, accuracy=self.metrics.get(metric))


@dataclass(frozen=True)
class CellResult:
    """The result of a cell. diverged: the round in which values were no longer finite; `rounds` has those before it."""

    rounds: tuple[RoundRow, ...]
    seconds: float
    diverged: int | None = None
    reason: str = ""
    """Why the run ended."""

    def by(self, metric: str) -> CellResult:
        """The result with this metric in the place of the accuracy."""
        return self if metric == ACCURACY else replace(self, rounds=tuple(row.by(metric) for row in self.rounds))

    @property
    def accuracies(self) -> list[float]:
        """The accuracy of every evaluation, in order, or the metric of `by`."""
        return [row.accuracy for row in self.rounds if row.accuracy is not None]

    def without(self, metric: str) -> str:
        """What to set if no evaluation has the metric; empty if one has it, or if there was no round."""
        names = {name for row in self.rounds for name in row.metrics}
        if not self.rounds or self.diverged is not None or self.by(metric).accuracies:
            return ""
        if not names:
            return (
                f"No evaluation has {metric}: evaluation.every and evaluation.clients_every are 0, or nobody has data."
            )
        use = [name] if (name := f"{PREFIX}{metric}") in names else sorted(names)
        return f"No evaluation has {metric}. Set report.metric to what the runs have: {', '.join(use)}."

    @property
    def measured(self) -> Mapping[str, float]:
        """The latest measures, and the latest statistics over clients of their own evaluations."""
        return {name: value for row in self.rounds for name, value in row.measures.items()}

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values; the inverse of `of`."""
        return {**asdict(self), "rounds": [row.as_json() for row in self.rounds]}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The result of a cell's file."""
        return cls(**{**values, "rounds": tuple(RoundRow(**row) for row in values["rounds"])})


@dataclass(frozen=True)
class CellFolder:
    """The files of finished cells. Several comparisons may use one folder at the same time."""

    path: Path

    def load(self, cell: Cell) -> CellResult | None:
        """The result of a cell; None if it has not been run."""
        try:
            values = json.loads(self._file(cell).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return CellResult.of(values["result"])

    def save(self, cell: Cell, result: CellResult) -> None:
        """Write the cell's file atomically and remove its saved state. Raises OpsError, for example for a full disk."""
        values = {"label": cell.label, "split": cell.split, "stage": cell.stage, "settings": cell.settings}
        with written_whole(Target(self._file(cell), replace=True)) as file:
            file.write(json.dumps({**values, "result": result.as_json()}, indent=1).encode() + b"\n")
        shutil.rmtree(self.saved(cell), ignore_errors=True)

    def saved(self, cell: Cell) -> Path:
        """The folder for the state of a cell that has not ended."""
        return self.path / "unfinished" / cell.digest

    def _file(self, cell: Cell) -> Path:
        return self.path / f"{cell.digest}.json"
