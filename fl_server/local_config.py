"""The local training of a run's clients, a section of its configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from algorithms.optimizers.spec import OptimizerSpec, RateSchedule
from fl_server.plain_values import MAX_COUNT, MAX_NUMBER, Word, check_plain

MAX_PARAMETERS, MAX_LIST = 64, 16
"""Parameters of an optimizer, and numbers in one of them."""


class Section(BaseModel):
    """A table of a run's configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OptimizerSection(Section):
    """The optimizer of the local steps. `algorithms.optimizers` checks the parameters."""

    name: Word = Field(min_length=1)
    parameters: dict[Word, bool | float | str | tuple[float, ...]] = Field(default={}, max_length=MAX_PARAMETERS)
    state: Literal["fresh", "device", "server"] = "fresh"

    @field_validator("parameters", mode="before")
    @classmethod
    def _few(cls, parameters: Any) -> Any:
        check_plain(parameters)
        if isinstance(parameters, dict) and any(
            isinstance(value, list | tuple) and len(value) > MAX_LIST for value in parameters.values()
        ):
            raise ValueError(f"expected lists of at most {MAX_LIST} numbers")
        return parameters

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer as `algorithms` has it."""
        return OptimizerSpec(self.name, self.parameters, self.state)


class RateSection(Section):
    """A factor of the learning rate over steps or rounds."""

    kind: Literal["constant", "linear", "cosine"]
    warmup: float = Field(default=0.0, ge=0, lt=1)
    end: float | None = Field(default=None, ge=0, le=MAX_NUMBER)

    @model_validator(mode="after")
    def _valid(self) -> RateSection:
        if self.end is not None and self.kind == "constant":
            raise ValueError('expected no end with kind = "constant", which does not read it')
        return self

    @property
    def schedule(self) -> RateSchedule:
        """The schedule as `algorithms` has it."""
        return RateSchedule(self.kind, self.warmup, self.end)


class RateChange(Section):
    """A learning rate that applies from a round on."""

    round: int = Field(ge=0, le=MAX_COUNT)
    learning_rate: float = Field(gt=0, le=MAX_NUMBER)


class LocalSection(Section):
    """A client's local training in a round."""

    learning_rate: float = Field(default=0.1, gt=0, le=MAX_NUMBER)
    learning_rate_decay: float = Field(default=1.0, gt=0, le=1)
    epochs: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    steps: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    batch_size: int = Field(default=32, ge=1, le=MAX_COUNT)
    weight_decay: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    max_gradient_norm: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    learning_rate_changes: tuple[RateChange, ...] = ()
    optimizer: OptimizerSection | None = None
    schedule: RateSection | None = None
    round_schedule: RateSection | None = None
    micro_batch_size: int = Field(default=0, ge=0, le=MAX_COUNT)
    inexact: bool = False

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
        """eta_l * r^t; t counts from the latest change. `RunConfig.learning_rate_in` applies the schedule too."""
        rate, since = self.learning_rate, 0
        for change in self.learning_rate_changes:
            if change.round <= round:
                rate, since = change.learning_rate, change.round
        return rate * self.learning_rate_decay ** (round - since)

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer of the local steps; plain SGD if none is given."""
        return OptimizerSpec() if self.optimizer is None else self.optimizer.spec

    @property
    def step_schedule(self) -> RateSchedule:
        """The schedule over the steps of a round; constant if none is given."""
        return RateSchedule() if self.schedule is None else self.schedule.schedule

    def with_rate(self, learning_rate: float, round: int) -> LocalSection:
        """A copy with this learning rate from a round on."""
        earlier = tuple(change for change in self.learning_rate_changes if change.round < round)
        change = RateChange(round=round, learning_rate=learning_rate)
        return self.model_copy(update={"learning_rate_changes": (*earlier, change)})
