"""The newest reading of each view that is open. Pages that show the same share it, with the HTML of its parts."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from fl_web.coordinator.reader import Reader
from fl_web.rendering import rendered
from fl_web.views.view import Context, Params, View

_MOST_KEPT = 64
"""Readings in memory: at most so many views are read without sharing."""
Key = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class Shown:
    """What a page shows: a view with the values of its address, for an identity."""

    view: View
    reader: Reader
    params: Params


@dataclass(frozen=True, slots=True)
class Reading:
    """The values of a view at a time, and the HTML of each of its parts."""

    context: Context
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Kept:
    reader: Reader
    """Kept too, so that its id is not another's."""
    began: float
    task: asyncio.Task[Reading]


class Readings:
    """The readings of all pages of this process."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()

    async def of(self, shown: Shown, since: float) -> Reading:
        """A reading that began not before `since`, by the monotonic clock. Raises as the view's context does."""
        key = (id(shown.reader), shown.view.name, shown.params.address())
        kept = self._kept.get(key)
        if kept is None or kept.began < since or _failed(kept.task):
            kept = self._kept[key] = _Kept(shown.reader, time.monotonic(), asyncio.create_task(_read(shown, since)))
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return await asyncio.shield(kept.task)


async def _read(shown: Shown, since: float) -> Reading:
    context = await shown.view.context(shown.reader.since(since), shown.params)
    return Reading(context, {name: rendered(template, context) for name, template in shown.view.parts.items()})


def _failed(task: asyncio.Task[Reading]) -> bool:
    """Whether a reading has failed. The failure is read here, so that asyncio does not log it as never retrieved."""
    return task.done() and (task.cancelled() or task.exception() is not None)
