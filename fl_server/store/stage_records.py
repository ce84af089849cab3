"""The records of the stages of secure aggregation: who was asked, and what each client answered."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = ("tossing", "sharing", "collecting", "signing", "opening")
"""The stages after that of the keys, in order, by the values of their phases."""


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage of a round that was opened. It is written before its messages are sent."""

    run_id: str
    round: int
    exchange: int
    attempt: int
    stage: str
    """The value of its phase: "sharing". "collecting" for the masked updates."""
    members: tuple[str, ...]
    """The clients that are asked, in the order of id bytes."""
    closed: tuple[str, ...]
    """The clients whose answers ended the stage before, in this order."""
    opened_at: float


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """A client's answer to a stage. The first one stands. Answers are removed when their round is committed."""

    run_id: str
    round: int
    exchange: int
    attempt: int
    stage: str
    client_id: str
    content: bytes
