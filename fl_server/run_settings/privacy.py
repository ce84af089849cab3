"""The sections `privacy` and `secure_aggregation` of a run.

Differential privacy limits what its models tell of single clients or records. With secure aggregation the coordinator
sees the sum of a round's updates, and no single one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fl_server.run_settings.sections import MAX_COUNT, MAX_NUMBER, MAX_SECONDS, Section, Word

LEAST_CLIENTS = 3
"""A sum of two updates shows each of the two clients the other's."""
MAX_PAYLOADS, MAX_METRICS = 32, 16


class PrivacySection(Section):
    """What is protected, and how much may be spent on it."""

    unit: Literal["client", "record"]
    noise_multiplier: float = Field(gt=0, le=1e6)
    clip: float = Field(gt=0, le=MAX_NUMBER)
    delta: float = Field(gt=0, lt=1)
    max_epsilon: float | None = Field(default=None, gt=0, le=1e6)
    account: Word = ""
    clip_quantile: float | None = Field(default=None, gt=0, lt=1)
    clip_rate: float | None = Field(default=None, gt=0, le=10)
    clip_noise: float | None = Field(default=None, gt=0, le=1e6)

    @model_validator(mode="after")
    def _account_of_its_unit(self) -> Self:
        if self.unit == "client" and self.max_epsilon is None:
            raise ValueError('expected max_epsilon with unit = "client": the run ends before it spends more')
        if self.unit == "record" and (self.max_epsilon is not None or self.account):
            raise ValueError(
                'expected neither max_epsilon nor account with unit = "record": each device has an account of its own,'
                " and the limit of its site"
            )
        if self.clip_quantile is not None and self.unit == "record":
            raise ValueError('expected no clip_quantile with unit = "record": its gradients have a fixed clip')
        if self.clip_quantile is None and (self.clip_rate is not None or self.clip_noise is not None):
            raise ValueError("expected clip_quantile with clip_rate and clip_noise: without it the clip is fixed")
        return self

    @property
    def limit(self) -> float:
        """max_epsilon; infinite where each device has its own."""
        return math.inf if self.max_epsilon is None else self.max_epsilon


def hides_cohorts(spec: object) -> bool:
    """Whether the cohorts of a run with this spec are hidden. spec: as the ledger has it, which may be damaged."""
    privacy = spec.get("privacy") if isinstance(spec, Mapping) else None
    return isinstance(privacy, Mapping) and privacy.get("unit") == "client"


class SecureAggregationSection(Section):
    """The protocol, what it protects from, and how updates are rounded."""

    protocol: Literal["secagg+"] = "secagg+"
    bits: int = Field(default=16, ge=4, le=24)
    clip: float = Field(gt=0, le=MAX_NUMBER)
    min_clients: int = Field(default=LEAST_CLIENTS, ge=LEAST_CLIENTS, le=MAX_COUNT)
    max_corrupt: float = Field(default=0.1, ge=0, lt=1 / 3)
    max_dropped: float = Field(default=0.1, ge=0, lt=1 / 3)
    on_drop: Literal["repeat", "end"] = "repeat"
    stage_s: float = Field(default=60.0, gt=0, le=MAX_SECONDS)
    suite: Literal["aes-256-ctr", "chacha20"] = "aes-256-ctr"
    max_examples: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    clips: dict[Word, Annotated[float, Field(gt=0, le=MAX_NUMBER)]] = Field(default={}, max_length=MAX_PAYLOADS)
    min_steps: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    metrics: tuple[Annotated[Word, Field(min_length=1)], ...] = Field(
        default=("loss", "accuracy"), max_length=MAX_METRICS
    )


def without_relative_limits(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run. With privacy of clients, or secure aggregation, limits that depend on others are off."""
    round_, privacy = values.get("round", {}), values.get("privacy")
    unit = privacy.get("unit") if isinstance(privacy, Mapping) else getattr(privacy, "unit", None)
    if not (unit == "client" or values.get("secure_aggregation")) or not isinstance(round_, dict):
        return dict(values)
    return {**values, "round": {"max_relative_norm": 0.0, "max_relative_payload": 0.0, **round_}}
