"""What a rule of the round state machine is, and what is raised where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_server.events import Command, Event
from fl_server.round_state import RoundState

Result = tuple[RoundState, tuple[Command, ...]]
Rule = Callable[[RoundState, Any], Result]


class UnexpectedEvent(Exception):
    """An event that the phase has no rule for; nothing was changed. It is a fault of whoever drives the machine."""

    def __init__(self, event: Event, state: RoundState, why: str = "no rule for it") -> None:
        super().__init__(f"{type(event).__name__} in phase {state.phase.value} of round {state.round}: {why}")
        self.event = event
        self.state = state
