"""The points of a run's curves that a browser does not have yet."""

from __future__ import annotations

from typing import Any

from fl_web.curves.charts import chart_json
from fl_web.facts.rounds import Round

_COMPARED = 25
"""Newest rounds whose values may still change: an evaluation comes after its round."""


class CurveUpdates:
    """What one browser has of the curves of a run. It reads the curves once itself, after its stream is open."""

    def __init__(self) -> None:
        self._seen: dict[int, Round] | None = None
        self._marks = 0

    def since_last(self, context: dict[str, Any]) -> dict[str, Any] | None:
        """New and changed points by chart; None if there are none. context: of the view of a run."""
        rounds: list[Round] = context["rounds"]
        newest = {each.round: each for each in rounds[-_COMPARED:]}
        before, self._seen = self._seen, newest
        marks, self._marks = self._marks, len(context["marks"])
        if before is None:
            return {"reload": True}
        first = max(before, default=-1)
        if rounds and rounds[-1].round - first > _COMPARED:
            return {"reload": True}
        changed = [
            each for each in newest.values() if before.get(each.round) != each and each.round >= min(before, default=0)
        ]
        if not changed and marks == self._marks:
            return None
        charts = [chart_json(chart, changed, context["created"]) for chart in context["charts"]]
        return {"charts": charts, "marks": context["marks"]}
