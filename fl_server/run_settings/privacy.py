"""The section `privacy` of a run: differential privacy of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from fl_server.run_settings.sections import CHECKS, MAX_NUMBER, Word


class PrivacySection(BaseModel):
    """What is protected, and how much may be spent on it."""

    model_config = CHECKS

    unit: Literal["client"]
    noise_multiplier: float = Field(gt=0, le=1e6)
    clip: float = Field(gt=0, le=MAX_NUMBER)
    delta: float = Field(gt=0, lt=1)
    max_epsilon: float = Field(gt=0, le=1e6)
    account: Word = ""


def with_private_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run. With privacy the limits that depend on other clients are off by default."""
    round_ = values.get("round", {})
    if values.get("privacy") is None or not isinstance(round_, dict):
        return dict(values)
    return {**values, "round": {"max_relative_norm": 0.0, "max_relative_payload": 0.0, **round_}}
