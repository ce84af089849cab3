"""The table [simulation.system]: the devices of the simulated clients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from fl_common.settings import Section, describe_error, shown


class Lognormal(Section):
    """median * exp(sigma * z), z standard normal."""

    distribution: Literal["lognormal"]
    median: float = Field(gt=0)
    sigma: float = Field(ge=0, le=10)


class Uniform(Section):
    """A value between low and high, each equally likely."""

    distribution: Literal["uniform"]
    low: float
    high: float

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"expected low to be at most high ({self.high:g}), got {self.low:g}")
        return self


class Column(Section):
    """A column of a CSV file with a header, a row for each device."""

    file: str = Field(min_length=1)
    column: str = Field(min_length=1)


class Range(NamedTuple):
    """The values that a quantity may have."""

    low: float
    high: float
    words: str
    above_low: bool = False
    """Whether `low` itself is not allowed."""

    def has(self, value: float) -> bool:
        """Whether a value is in the range. Infinity and NaN are in none."""
        return math.isfinite(value) and self.low <= value <= self.high and not (self.above_low and value == self.low)


RATE = Range(0.0, math.inf, "a number greater than 0", above_low=True)
SECONDS = Range(0.0, math.inf, "a number of seconds, 0 or more")
SHARE = Range(0.0, 0.99, "a probability from 0 to 0.99")

_TABLES: dict[str, type[Section]] = {"lognormal": Lognormal, "uniform": Uniform}


def _read(value: Any) -> Any:
    """A number as it is; a table as the kind of table that its keys name."""
    if isinstance(value, Section):
        return value
    if isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    kind = None
    if isinstance(value, dict):
        kind = Column if "file" in value else _TABLES.get(str(value.get("distribution")))
    if kind is None:
        raise ValueError(
            'expected a number, { distribution = "lognormal", median = 1.0, sigma = 0.5 }, '
            '{ distribution = "uniform", low = 1.0, high = 2.0 } or { file = "devices.csv", column = "speed" }, '
            f"got {shown(value)}"
        )
    return _checked(kind, value)


def _checked(kind: type[Section], value: dict[str, Any]) -> Section:
    """A table of this kind. A union of kinds would give an error for each of them."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ValueError(describe_error(error.errors()[0], kind)) from None


def _within(allowed: Range) -> Callable[[Any], Any]:
    def check(quantity: Any) -> Any:
        if isinstance(quantity, Lognormal) and allowed.high < math.inf:
            raise ValueError(f"expected {allowed.words}, got a lognormal distribution, which has no upper limit")
        ends = (quantity.low, quantity.high) if isinstance(quantity, Uniform) else (quantity,)
        for end in ends:
            if isinstance(end, float) and not allowed.has(end):
                raise ValueError(f"expected {allowed.words}, got {end:g}")
        return quantity

    return check


Quantity = float | Lognormal | Uniform | Column
"""A number for all clients, or a distribution or file from which each client has its own."""
_Rate = Annotated[Quantity, AfterValidator(_within(RATE)), BeforeValidator(_read)]
_Seconds = Annotated[Quantity, AfterValidator(_within(SECONDS)), BeforeValidator(_read)]
_Share = Annotated[Quantity, AfterValidator(_within(SHARE)), BeforeValidator(_read)]


class DutyCycle(Section):
    """Times on and off that alternate; both are exponential."""

    on_s: float = Field(gt=0)
    """Mean seconds for which a client is available without a break."""
    off_s: float = Field(gt=0)
    """Mean seconds for which it is away."""


class Intervals(Section):
    """A CSV file of the intervals in which clients are available."""

    file: str = Field(min_length=1)
    repeat_s: float | None = Field(default=None, gt=0)
    """Seconds after which the intervals repeat. None: after its last interval a client is away for good."""


def _read_availability(value: Any) -> Any:
    if value is None or isinstance(value, Section):
        return value
    if isinstance(value, dict) and ("file" in value or not value.keys().isdisjoint({"on_s", "off_s"})):
        return _checked(Intervals if "file" in value else DutyCycle, value)
    raise ValueError(f'expected {{ on_s = 3600, off_s = 1800 }} or {{ file = "availability.csv" }}, got {shown(value)}')


class SystemSection(Section):
    """The devices of the simulated clients: what each one needs for its work, and when it is there."""

    speed: _Rate
    """Examples a second of local training, for one gradient of each example."""
    down: _Rate | None = None
    """Bytes a second from the server. None: a download takes no time."""
    up: _Rate | None = None
    """Bytes a second to the server. None: an upload takes no time."""
    latency_s: _Seconds = 0.0
    """Seconds that each assignment takes in addition."""
    drop_out: _Share = 0.0
    """Probability that a client does not finish an assignment."""
    availability: Annotated[DutyCycle | Intervals | None, BeforeValidator(_read_availability)] = None
    """When clients are there. None: always."""
    server_s: float = Field(default=0.0, ge=0)
    """Seconds of the server's own work in each round."""
