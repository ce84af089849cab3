"""How far a run is, and how long it will take at its present pace."""

from __future__ import annotations

from collections.abc import Sequence

from fl_web.coordinator.rounds import Round
from fl_web.render.formats import NOTHING, duration, seconds_of
from protos.fl.v1 import admin_pb2 as pb

_ROUNDS = 10
"""Newest rounds whose pace is taken."""
_COARSE_S = 300.0
"""An estimate of this length is given in minutes: its seconds mean nothing."""


def left_of_overview(run: pb.RunOverview) -> str:
    """The time that a run still needs, from its mean pace; a dash if it has none."""
    if run.HasField("ended") or not run.rounds_done or not run.rounds_planned or not run.HasField("latest_commit"):
        return NOTHING
    pace = (seconds_of(run.latest_commit) - seconds_of(run.created)) / run.rounds_done
    return _left(pace, run.rounds_planned - run.rounds_done)


def left_of_run(run: pb.RunStatus, rounds: Sequence[Round]) -> str:
    """The time that a run still needs, from the pace of its newest rounds; a dash if it has none."""
    if run.HasField("ended") or not rounds:
        return NOTHING
    newest = rounds[-_ROUNDS - 1 :]
    began, passed = (newest[0].committed, len(newest) - 1) if len(newest) > 1 else (seconds_of(run.created), 1)
    pace = (newest[-1].committed - began) / passed
    return _left(pace, run.spec.stop.rounds - run.rounds_done)


def _left(pace: float, rounds: int) -> str:
    if rounds <= 0:
        return NOTHING
    seconds = max(0.0, pace * rounds)
    return f"about {round(seconds / 60)} min" if _COARSE_S <= seconds < 3600 else f"about {duration(seconds)}"
