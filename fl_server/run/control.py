"""The interface of a run to its parts: its current state and status, events, tasks, and writes to the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Protocol, TypeVar

from fl_server.rounds import events as ev
from fl_server.run.eligible import Drawing, EligibleClients
from fl_server.run.status.current import Described, RunStatus

R = TypeVar("R")
T = TypeVar("T")


class RunControl(Drawing, Described, Protocol):
    """The run as its parts see it. `Run` implements it; everything here is used on the event loop only.

    `Drawing` is the part that the eligible clients need, `Described` the part that the status needs.
    """

    @property
    def run_status(self) -> RunStatus:
        """The run's status, and why it makes no progress."""

    @property
    def eligible(self) -> EligibleClients:
        """The clients that may be drawn."""

    @property
    def turn(self) -> asyncio.Lock:
        """Held while an event is processed, so that the state cannot change in between."""

    def applies(self, event: ev.Event) -> bool:
        """Whether the event still means something in the current state."""

    def post(self, event: ev.Event) -> None:
        """Queue an event. A run that has ended ignores it."""

    async def in_turn(self, work: Callable[[], Awaitable[R]]) -> R:
        """Do work that holds the turn, to its end: also if the call that asked for it is cancelled."""

    def fail(self, reason: str) -> None:
        """End the run with an error. The last committed model stays."""

    def fleet_changed(self) -> None:
        """Wake the loop: the set of present clients may have changed."""


TURN_ITEMS = 50
"""Items of a long list that are worked on without a turn for other calls in between: some milliseconds."""


async def with_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items of a long list. Other calls of the event loop get their turns in between."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % TURN_ITEMS == 0:
            await asyncio.sleep(0)
