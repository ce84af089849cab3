"""The section `secure_aggregation` of a run: the coordinator sees the sum of a round's updates, and no single one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from fl_server.run_settings.sections import CHECKS, MAX_COUNT, MAX_NUMBER, MAX_SECONDS, Word

LEAST_CLIENTS = 3
"""A sum of two updates shows each of the two clients the other's."""


MAX_PAYLOADS, MAX_METRICS = 32, 16


class SecureAggregationSection(BaseModel):
    """The protocol, what it protects from, and how updates are rounded."""

    model_config = CHECKS

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


def with_secure_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run. With secure aggregation the limits of single updates are off by default."""
    round_ = values.get("round", {})
    if not values.get("secure_aggregation") or not isinstance(round_, dict):
        return dict(values)
    return {**values, "round": {"max_relative_norm": 0.0, "max_relative_payload": 0.0, **round_}}
