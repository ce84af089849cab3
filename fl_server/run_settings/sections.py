"""The parts of a run's configuration on local training and on rounds, and what all parts share: limits of values.

A list of runs has all runs in one message, so each run must be small. Deeper or larger values are refused before they
are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from fl_common.built_in import REDUCERS
from fl_server.rounds.sampling import Sampling
from protos.run_file import MOST_WHOLE

MAX_COUNT = 2**32 - 1
"""Largest number of rounds, clients, steps or examples in a batch: the range of RunSpec's fields."""
MAX_EXAMPLES = 2**53
"""Largest number of examples: above it a float64, which is used for weights, does not hold every whole number."""
MAX_SECONDS = 1_000_000_000
"""Longest time, about 31 years, which timers and durations can represent."""
MAX_NUMBER = 3e38
"""Largest learning rate, decay or norm: a float32 on a device can represent it."""
MAX_STALENESS = 1000
"""Most versions between the model that an update began from and the one that it is added to."""
MAX_DEPTH = 16
"""Deepest nesting of tables and lists."""
MAX_VALUES = 4096
"""Names and values in a table of options in total."""
MAX_TEXT = 16 << 10
"""Characters of all names and texts in a table of options."""
MAX_LABELS = 256
"""Labels by which a run selects clients."""
MAX_SCHEDULES = 16
"""Parameters that change from round to round."""
MAX_PATTERNS = 64
"""Patterns of the names of personal parameters."""
MAX_CHARS = 256
"""Longest name."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected text on one line without control characters")
    return text


Word = Annotated[str, Field(max_length=MAX_CHARS), AfterValidator(_printable)]
"""A name that is shown in logs and tables."""
FileName = Annotated[str, Field(max_length=4096), AfterValidator(_printable)]
"""A path, up to the usual limit of operating systems."""


def checked_plain(values: Any) -> Any:
    """The values. Raises ValueError for ones that are too deep or too many, and for numbers that are not finite."""
    characters = 0
    for entries, (depth, value) in enumerate(_leaves(values), start=1):
        characters += len(value) if isinstance(value, str) else 0
        if depth > MAX_DEPTH:
            raise ValueError(f"expected at most {MAX_DEPTH} tables within each other")
        if entries > MAX_VALUES:
            raise ValueError(f"expected at most {MAX_VALUES} names and values")
        if characters > MAX_TEXT:
            raise ValueError(f"expected at most {MAX_TEXT:,} characters in all")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("expected finite numbers")
        if isinstance(value, int) and abs(value) > MOST_WHOLE:
            raise ValueError(f"expected whole numbers from -{MOST_WHOLE} to {MOST_WHOLE}, or larger ones as text")
    return values


def _leaves(values: Any) -> Iterator[tuple[int, Any]]:
    """Every name and value with its depth, without recursion, whose depth the values would determine."""
    waiting = [(0, values)]
    while waiting:
        depth, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(depth + 1, part) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple):
            waiting += [(depth + 1, part) for part in value]
        if not isinstance(value, Mapping | list | tuple) or depth > MAX_DEPTH:
            yield depth, value


MAX_PARAMETERS, MAX_LIST = 64, 16
"""Parameters of an optimizer, and numbers in one of them."""

Parameters = Annotated[dict[str, float | str | bool], BeforeValidator(checked_plain)]
"""Parameters of a method or of a reducer, by name."""


class Section(BaseModel):
    """A table of a run's configuration, with the checks of all."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Fingerprint(Section):
    """Which code of a method or a reducer from outside a run has. The coordinator sets it when it creates the run."""

    version: Word = ""
    source: Word = ""

    def __str__(self) -> str:
        return f"version {self.version!r} {self.source}"


class OptimizerSection(Section):
    """The optimizer of the local steps. `algorithms.optimizers` checks the parameters."""

    name: Word = Field(min_length=1)
    parameters: dict[Word, bool | float | str | tuple[float, ...]] = Field(default={}, max_length=MAX_PARAMETERS)
    state: Literal["fresh", "device", "server"] = "fresh"

    @field_validator("parameters", mode="before")
    @classmethod
    def _few(cls, parameters: Any) -> Any:
        values = checked_plain(parameters).values() if isinstance(parameters, dict) else ()
        if any(isinstance(value, list | tuple) and len(value) > MAX_LIST for value in values):
            raise ValueError(f"expected lists of at most {MAX_LIST} numbers")
        return parameters


class RateSection(Section):
    """A factor of the learning rate over steps or rounds."""

    kind: Literal["constant", "linear", "cosine"]
    warmup: float = Field(default=0.0, ge=0, lt=1)
    end: float | None = Field(default=None, ge=0, le=MAX_NUMBER)
    over: Literal["round", "run"] = "round"

    @model_validator(mode="after")
    def _valid(self) -> RateSection:
        if self.end is not None and self.kind == "constant":
            raise ValueError('expected no end with kind = "constant", which does not read it')
        return self


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
    continue_data: bool = False

    @field_validator("learning_rate_changes")
    @classmethod
    def _in_order(cls, changes: tuple[RateChange, ...]) -> tuple[RateChange, ...]:
        rounds = [change.round for change in changes]
        if rounds != sorted(set(rounds)):
            raise ValueError(f"expected each change in a later round than the one before, got the rounds {rounds}")
        return changes

    @model_validator(mode="after")
    def _schedule_over_a_known_number(self) -> LocalSection:
        if self.round_schedule is not None and self.round_schedule.over == "run":
            raise ValueError('expected no over = "run" in round_schedule, which is over the rounds of the run anyway')
        if self.schedule is not None and self.schedule.over == "run" and self.steps is None:
            raise ValueError('expected local.steps with schedule.over = "run": it goes over steps * rounds, got epochs')
        return self

    @model_validator(mode="before")
    @classmethod
    def _one_kind_of_work(cls, values: dict[str, Any]) -> dict[str, Any]:
        given = [name for name in ("epochs", "steps") if values.get(name) is not None]
        if len(given) == 2:
            raise ValueError("expected epochs or steps, got both: remove one")
        return values if given else {**values, "epochs": 1}

    def learning_rate_in(self, round: int) -> float:
        """eta_l * r^t, without the factor of the schedule over rounds; t counts from the latest change."""
        rate, since = self.learning_rate, 0
        for change in self.learning_rate_changes:
            if change.round <= round:
                rate, since = change.learning_rate, change.round
        return rate * self.learning_rate_decay ** (round - since)

    def with_rate(self, learning_rate: float, round: int) -> LocalSection:
        """A copy with this learning rate from a round on."""
        earlier = tuple(change for change in self.learning_rate_changes if change.round < round)
        change = RateChange(round=round, learning_rate=learning_rate)
        return self.model_copy(update={"learning_rate_changes": (*earlier, change)})


class StalenessSection(Section):
    """How much an update counts that is some versions old. `algorithms.staleness` checks the values."""

    kind: Word = Field(default="polynomial", min_length=1)
    exponent: float | None = Field(default=None, gt=0, le=MAX_NUMBER)
    slope: float | None = Field(default=None, gt=0, le=MAX_NUMBER)
    after: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    fingerprint: Fingerprint | None = None

    @property
    def values(self) -> dict[str, float]:
        """The values of the rule that are given."""
        given = {"exponent": self.exponent, "slope": self.slope, "after": self.after}
        return {name: value for name, value in given.items() if value is not None}


OF_COHORTS = ("sampling", "rate", "clients_per_round", "quorum", "over_selection")
"""Keys of a round that a run with a buffer does not have."""


class RoundSection(Section):
    """Which clients take part in a round, and when it closes."""

    sampling: Sampling = "fixed"
    clients_per_round: int = Field(default=2, ge=1, le=MAX_COUNT)
    rate: float = Field(default=0.1, gt=0, le=1)
    min_clients: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    close: Literal["cohort", "goal", "buffer"] = "cohort"
    goal: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    concurrency: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    max_staleness: int | None = Field(default=None, ge=0, le=MAX_STALENESS)
    staleness: StalenessSection | None = None
    stale_direction: Literal["current", "sent"] | None = None
    quorum: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    min_accepted: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    deadline_s: float = Field(default=600.0, gt=0, le=MAX_SECONDS)
    over_selection: float = Field(default=1.3, ge=1, le=4)
    max_update_norm: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    clip_update_norm: float = Field(default=0.0, ge=0, le=MAX_NUMBER)
    max_relative_norm: float = Field(default=100.0, ge=0, le=MAX_NUMBER)
    over_relative_norm: Literal["refuse", "clip"] = "refuse"
    max_relative_payload: float = Field(default=100.0, ge=0, le=MAX_NUMBER)
    max_client_share: float = Field(default=0.0, ge=0, le=1)
    reducer: Word = Field(default="mean", min_length=1)
    reducer_parameters: Parameters = Field(default={})
    reducer_fingerprint: Fingerprint | None = None
    trim: float = Field(default=0.2, gt=0, lt=0.5)
    krum_byzantine: int = Field(default=1, ge=1, le=MAX_COUNT)
    krum_keep: int = Field(default=0, ge=0, le=MAX_COUNT)

    @model_validator(mode="before")
    @classmethod
    def _of_buffer(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Defaults of what only a run with a buffer has."""
        own: dict[str, Any] = {
            "concurrency": values.get("goal"),
            "max_staleness": 20,
            "staleness": {},
            "stale_direction": "sent",
        }
        if values.get("close") != "buffer":
            if given := sorted(name for name in ("goal", *own) if values.get(name) is not None):
                raise ValueError(f'expected {given[0]} only with close = "buffer"')
            return values
        if values.get("goal") is None:
            raise ValueError('expected goal, the updates of a step, with close = "buffer"')
        return {**values, **{name: value for name, value in own.items() if values.get(name) is None}}

    @model_validator(mode="after")
    def _without_cohorts(self) -> Self:
        """Raises ValueError for a setting of cohorts in a run with a buffer."""
        if self.close == "buffer":
            for name in OF_COHORTS:
                if (came := getattr(self, name)) != RoundSection.model_fields[name].default:
                    raise ValueError(f'expected no {name} with close = "buffer", which draws no cohorts; got {came!r}')
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.quorum is not None and self.sampling == "fixed" and self.quorum > self.clients_per_round:
            raise ValueError(
                f"expected quorum to be at most clients_per_round ({self.clients_per_round}), got {self.quorum}"
            )
        cohorts = self.sampling == "fixed" and self.close != "buffer"
        if self.min_clients is not None and cohorts and self.min_clients < self.clients_per_round:
            raise ValueError(
                f"expected min_clients to be at least clients_per_round ({self.clients_per_round}), "
                f"got {self.min_clients}"
            )
        self._check_least()
        for key in ("max_relative_norm", "max_relative_payload"):
            if 0 < getattr(self, key) < 1:
                raise ValueError(
                    f"expected {key} to be 0 or at least 1, because half of all updates exceed the median or equal it, "
                    f"got {getattr(self, key):g}"
                )
        return self

    def _check_least(self) -> None:
        """Raises ValueError if a round could not have min_accepted updates, or could close with fewer."""
        sizes = {"min_clients": self.min_clients, "quorum": self.quorum}
        if self.close == "buffer":
            sizes["goal"] = self.goal
        elif self.sampling == "fixed":
            sizes["clients_per_round"] = self.clients_per_round
        for key, size in sizes.items():
            if size is not None and size < self.least:
                raise ValueError(
                    f"expected {key} to be at least min_accepted ({self.least}; the coordinator's rounds.min_accepted "
                    f"is the least of a run by an operator who is no admin), got {size}"
                )

    @model_validator(mode="after")
    def _reducer_has_enough(self) -> Self:
        """Every round that closes must have enough updates for the reducer. One from outside is checked when loaded."""
        if self.reducer in REDUCERS and self.reducer_parameters:
            raise ValueError(
                f'expected no reducer_parameters with reducer = "{self.reducer}": they are of reducers from outside,'
                " built-in ones have trim, krum_byzantine and krum_keep"
            )
        if self.reducer == "mean" or self.reducer not in REDUCERS:
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
        kept = self.krum_keep or self.fewest - self.krum_byzantine - 2
        if krum and kept < self.least:
            raise ValueError(
                f"expected krum_keep, or else quorum - krum_byzantine - 2, to be at least min_accepted ({self.least}), "
                f"got {kept}"
            )
        return self

    @property
    def least(self) -> int:
        """Fewest updates that a model may be made of."""
        return self.min_accepted or 1

    @property
    def fewest(self) -> int:
        """Fewest updates that may close a round: with "bernoulli" also half of its goal, with a buffer its goal."""
        if self.goal is not None:
            return self.goal
        half = (self.clients_per_round + 1) // 2 if self.sampling == "fixed" else 1
        return max(self.quorum or half, self.least)
