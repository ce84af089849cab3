"""A run's configuration: field for field RunSpec of admin.proto, with defaults and checks.

The same names stand in a run's TOML file, on the wire and here; RunSpec carries presence, this carries meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from google.protobuf.json_format import MessageToDict, ParseDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fl_server.client_metrics import by_clients
from fl_server.errors import InvalidInput
from fl_server.plain_values import (
    MAX_COUNT,
    MAX_EXAMPLES,
    MAX_LABELS,
    MAX_NUMBER,
    MAX_SECONDS,
    MAX_SPEC_BYTES,
    FileName,
    Word,
    check_plain,
    plain,
)
from fl_server.round_state import RoundPolicy
from protos.fl.v1 import admin_pb2


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskSection(_Section):
    """What is learned."""

    name: Word = Field(min_length=1)
    options: dict[str, Any] = {}

    @field_validator("options", mode="before")
    @classmethod
    def _whole_numbers(cls, options: Any) -> Any:
        """The wire knows one kind of number: 62.0 was 62 in the file, and is again."""
        check_plain(options)
        return _with_whole_numbers(options) if isinstance(options, dict) else options


class AlgorithmSection(_Section):
    """Which method, and its own parameters."""

    name: Word = "fedcm"
    parameters: dict[str, float | str | bool] = {}

    @field_validator("parameters", mode="before")
    @classmethod
    def _few(cls, parameters: Any) -> Any:
        check_plain(parameters)
        return parameters


class RateChange(_Section):
    """From which round on another learning rate holds."""

    round: int = Field(ge=0, le=MAX_COUNT)
    learning_rate: float = Field(gt=0, le=MAX_NUMBER)


class LocalSection(_Section):
    """A client's work in a round."""

    learning_rate: float = Field(default=0.1, gt=0, le=MAX_NUMBER)
    learning_rate_decay: float = Field(default=1.0, gt=0, le=1)
    epochs: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    steps: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    batch_size: int = Field(default=32, ge=1, le=MAX_COUNT)
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    max_gradient_norm: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    learning_rate_changes: tuple[RateChange, ...] = ()

    @field_validator("learning_rate_changes")
    @classmethod
    def _in_order(cls, changes: tuple[RateChange, ...]) -> tuple[RateChange, ...]:
        rounds = [change.round for change in changes]
        if rounds != sorted(set(rounds)):
            raise ValueError(f"expected each change in a later round than the one before, got the rounds {rounds}")
        return changes

    @model_validator(mode="before")
    @classmethod
    def _one_kind_of_work(cls, values: dict[str, Any]) -> dict[str, Any]:
        given = [name for name in ("epochs", "steps") if values.get(name) is not None]
        if len(given) == 2:
            raise ValueError("expected epochs or steps, got both: remove one")
        return values if given else {**values, "epochs": 1}

    def learning_rate_in(self, round: int) -> float:
        """eta_l(t) = eta_l * r^t, constant inside a round; t counts from the latest change, if there was one."""
        rate, since = self.learning_rate, 0
        for change in self.learning_rate_changes:
            if change.round <= round:
                rate, since = change.learning_rate, change.round
        return rate * self.learning_rate_decay ** (round - since)

    def with_rate(self, learning_rate: float, round: int) -> LocalSection:
        """The same, with this learning rate from a round on."""
        earlier = tuple(change for change in self.learning_rate_changes if change.round < round)
        change = RateChange(round=round, learning_rate=learning_rate)
        return self.model_copy(update={"learning_rate_changes": (*earlier, change)})


class RoundSection(_Section):
    """Who takes part in a round, and when it closes."""

    sampling: Literal["fixed", "bernoulli"] = "fixed"
    clients_per_round: int = Field(default=2, ge=1, le=MAX_COUNT)
    rate: float = Field(default=0.1, gt=0, le=1)
    min_clients: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    close: Literal["cohort", "goal"] = "cohort"
    quorum: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    deadline_s: float = Field(default=600.0, gt=0, le=MAX_SECONDS)
    over_selection: float = Field(default=1.3, ge=1, le=4)
    max_update_norm: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    clip_update_norm: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    max_relative_norm: float = Field(default=100.0, ge=0, le=MAX_NUMBER)
    over_relative_norm: Literal["refuse", "clip"] = "refuse"
    max_relative_payload: float = Field(default=100.0, ge=0, le=MAX_NUMBER)
    max_client_share: float = Field(default=0.0, ge=0, le=1)
    reducer: Literal["mean", "median", "trimmed_mean", "krum"] = "mean"
    trim: float = Field(default=0.2, gt=0, lt=0.5)
    krum_byzantine: int = Field(default=1, ge=1, le=MAX_COUNT)
    krum_keep: int = Field(default=0, ge=0, le=MAX_COUNT)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.quorum is not None and self.sampling == "fixed" and self.quorum > self.clients_per_round:
            raise ValueError(
                f"expected quorum to be at most clients_per_round ({self.clients_per_round}), got {self.quorum}"
            )
        if self.min_clients is not None and self.sampling == "fixed" and self.min_clients < self.clients_per_round:
            raise ValueError(
                f"expected min_clients to be at least clients_per_round ({self.clients_per_round}), "
                f"got {self.min_clients}"
            )
        for key in ("max_relative_norm", "max_relative_payload"):
            if 0 < getattr(self, key) < 1:
                raise ValueError(
                    f"expected {key} to be 0 or at least 1, for half of all updates reach the median, "
                    f"got {getattr(self, key):g}"
                )
        return self

    @model_validator(mode="after")
    def _reducer_has_enough(self) -> Self:
        """Every round that closes must have updates enough for what the reducer promises."""
        if self.reducer == "mean":
            return self
        if self.sampling != "fixed":
            raise ValueError(f'expected sampling = "fixed" with reducer = "{self.reducer}": a cohort may be too small')
        krum = self.reducer == "krum"
        least = 2 * self.krum_byzantine + 3 if krum else 3
        if self.fewest < least:
            raise ValueError(
                f'expected quorum to be at least {least} with reducer = "{self.reducer}"'
                f"{' (2 krum_byzantine + 3)' if krum else ''}, got {self.fewest}"
            )
        if krum and self.krum_keep > self.fewest - self.krum_byzantine - 2:
            raise ValueError(
                "expected krum_keep to be at most quorum - krum_byzantine - 2 "
                f"({self.fewest - self.krum_byzantine - 2}), got {self.krum_keep}"
            )
        return self

    @property
    def fewest(self) -> int:
        """Updates that may close a round."""
        return self.quorum or (max(1, (self.clients_per_round + 1) // 2) if self.sampling == "fixed" else 1)


class StopSection(_Section):
    """When the run ends by itself."""

    rounds: int = Field(default=100, ge=1, le=MAX_COUNT)
    metric: Word = "accuracy"
    target: float | None = None
    patience: int = Field(default=0, ge=0, le=MAX_COUNT)
    wall_time_s: float = Field(default=0.0, ge=0, le=MAX_SECONDS)


class EvaluationSection(_Section):
    """How often the held-out data are looked at."""

    every: int = Field(default=1, ge=0, le=MAX_COUNT)
    batch_size: int = Field(default=512, ge=1, le=MAX_COUNT)
    clients_every: int = Field(default=0, ge=0, le=MAX_COUNT)
    clients: int = Field(default=0, ge=0, le=MAX_COUNT)
    clients_deadline_s: float = Field(default=60.0, gt=0, le=MAX_SECONDS)


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_whole_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class RunConfig(_Section):
    """A whole run."""

    name: str = Field(default="", pattern=r"^([a-z0-9_][a-z0-9._-]{0,63})?$")
    task: TaskSection
    algorithm: AlgorithmSection = AlgorithmSection()
    local: LocalSection = LocalSection()
    round: RoundSection = RoundSection()
    stop: StopSection = StopSection()
    evaluation: EvaluationSection = EvaluationSection()
    seed: int = Field(default=0, ge=0, lt=2**64)
    labels: dict[Word, Word] = Field(default={}, max_length=MAX_LABELS)
    population: int = Field(default=0, ge=0, le=MAX_COUNT)
    population_examples: int = Field(default=0, ge=0, le=MAX_EXAMPLES)
    planned_rounds: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    initial_model: FileName = ""
    keep_checkpoints: int = Field(default=2, ge=1, le=MAX_COUNT)

    @model_validator(mode="after")
    def _metric_rules_need_evaluations(self) -> Self:
        key = "clients_every" if by_clients(self.stop.metric) else "every"
        if self._looks_at_metrics and not getattr(self.evaluation, key):
            raise ValueError(f"expected evaluation.{key} over 0 with stop.target or stop.patience, got 0")
        return self

    @property
    def _looks_at_metrics(self) -> bool:
        return self.stop.target is not None or self.stop.patience > 0

    @property
    def horizon(self) -> int:
        """T, the rounds that schedules are laid out for."""
        return self.planned_rounds or self.stop.rounds

    def policy(self, exchanges: int = 1, population: int = 0) -> RoundPolicy:
        """The part that the round state machine looks at; `exchanges` and `population` as the algorithm wants them."""
        section = self.round
        floor = section.clients_per_round if section.sampling == "fixed" else 1
        return RoundPolicy(
            seed=self.seed,
            sampling=section.sampling,
            clients_per_round=section.clients_per_round,
            rate=section.rate,
            min_clients=section.min_clients or floor,
            close=section.close,
            quorum=section.fewest,
            deadline_s=section.deadline_s,
            over_selection=section.over_selection,
            exchanges=exchanges,
            population=population,
            evaluate_every=self.evaluation.every,
            await_evaluation=self._looks_at_metrics and not by_clients(self.stop.metric),
            ask_clients_every=self.evaluation.clients_every,
            await_clients=self._looks_at_metrics and by_clients(self.stop.metric),
        )

    def base_id(self) -> str:
        """The id the run gets if it is free."""
        words = re.sub(r"[^a-z0-9._-]+", "-", f"{self.task.name}-{self.algorithm.name}".lower())
        return self.name or words.lstrip(".-")[:56]


def from_values(values: dict[str, Any]) -> RunConfig:
    """Check plain values, as a TOML file or the store has them. Raises InvalidInput for the first field at fault."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        refused = _refused(error)
    # Not from inside the except block: pydantic's errors hide what they hold from the garbage collector, and the
    # request would stay in memory with the error of which it is the context.
    raise refused


def _refused(error: ValidationError) -> InvalidInput:
    """The first field at fault."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "run"
    return InvalidInput(field, expected(first), shown(first["input"]))


_LATER_LIMITS = {"max_relative_norm": 0.0, "max_relative_payload": 0.0, "max_client_share": 0.0}
"""Of `round`: what they are for a run whose program did not know them. What counted under it must count in a replay."""


def from_stored(spec: object) -> RunConfig:
    """A row of the ledger -> checked configuration. Raises InvalidInput, also for one that is no JSON object."""
    if not isinstance(spec, Mapping):
        raise InvalidInput("spec", "a JSON object in the run's row of the ledger", shown(spec))
    section = spec.get("round", {})
    return from_values({**spec, "round": {**_LATER_LIMITS, **section} if isinstance(section, Mapping) else section})


def expected(error: Any) -> str:
    """What pydantic wanted, in our words."""
    message: str = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return "no field of this name"
    if error["type"] == "missing":
        return "a value"
    return message.removeprefix("Input should be ").removeprefix("expected ")


def shown(value: object) -> str:
    """A value as an error shows it: short."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def from_spec(spec: admin_pb2.RunSpec) -> RunConfig:
    """Wire -> checked configuration. Raises InvalidInput."""
    if spec.ByteSize() > MAX_SPEC_BYTES:
        raise InvalidInput("spec", f"at most {MAX_SPEC_BYTES:,} bytes", f"{spec.ByteSize():,}")
    # What may have any shape is read with limits, and the rest without it: it is as deep as its schema.
    bare = admin_pb2.RunSpec()
    bare.CopyFrom(spec)
    bare.task.ClearField("options")
    bare.algorithm.ClearField("parameters")
    values = MessageToDict(bare, preserving_proto_field_name=True)
    for section, field, given in (
        ("task", "options", spec.task.options),
        ("algorithm", "parameters", spec.algorithm.parameters),
    ):
        if given.fields:
            values[section][field] = plain(given)
    return from_values(values)


def to_spec(config: RunConfig) -> admin_pb2.RunSpec:
    """Configuration -> wire, with every default filled in."""
    return ParseDict(config.model_dump(exclude_none=True), admin_pb2.RunSpec())
