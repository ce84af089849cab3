"""The places for evaluations on the server: as many as there are threads for them, given in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fl_server.aggregation.engine import Engine

GIVES_WAY = "the run has ended, and another one waits for its place"
_AGAIN_S = 1.0
"""An evaluation that has not begun yet cannot be left, so it is asked again after this time."""


@dataclass(eq=False, slots=True)
class Place:
    """The place of one run's evaluation, or its wait for one."""

    run_id: str
    over: bool
    """Whether the run is over. Its evaluation then gives way to those of others."""
    engine: Engine | None = None
    """The engine of the evaluation under way."""


class EvaluationSlots:
    """The places and who waits for one. Lives on the event loop."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._held: list[Place] = []
        self._waiting: list[Place] = []
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def place(self, run_id: str, *, over: bool) -> AsyncIterator[Place]:
        """A place for an evaluation, after those that asked before. Evaluations of runs that are over give way."""
        mine = Place(run_id, over)
        self._waiting.append(mine)
        try:
            await self._first_and_free(mine)
            self._held.append(mine)
        finally:
            self._waiting.remove(mine)
        try:
            yield mine
        finally:
            self._held.remove(mine)
            async with self._changed:
                self._changed.notify_all()

    async def _first_and_free(self, mine: Place) -> None:
        while self._waiting[0] is not mine or len(self._held) >= self._places:
            for place in self._held:
                if place.over and place.engine is not None:
                    place.engine.leave_evaluation(GIVES_WAY)
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), _AGAIN_S)
                except TimeoutError:
                    continue

    def note_end(self, run_id: str, *, over: bool) -> None:
        """A run is over now, or goes on."""
        for place in (*self._held, *self._waiting):
            if place.run_id == run_id:
                place.over = over

    def waits_for(self, run_id: str) -> str:
        """Why the evaluation of a run has no place yet; empty if none of it waits."""
        if not any(place.run_id == run_id for place in self._waiting):
            return ""
        holders = ", ".join(sorted({place.run_id for place in self._held})) or "none"
        return f"its evaluation waits until one of {self._places} ends on the server; under way: {holders}"
