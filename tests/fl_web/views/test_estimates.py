"""The time that a run still needs."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from fl_web.render.formats import NOTHING
from fl_web.views.estimates import left_of_run
from protos.fl.v1 import admin_pb2 as pb
from tests.fl_web.rounds import committed


def run_of(planned: int, done: int) -> pb.RunStatus:
    """A run that was created at second 1000."""
    run = pb.RunStatus(run_id="r", rounds_done=done, created=Timestamp(seconds=1000))
    run.spec.stop.rounds = planned
    return run


@pytest.mark.parametrize(
    ("planned", "commits", "expected"),
    [
        (3, [], NOTHING),
        (3, [1020.0], "about 40.0 s"),
        (4, [1100.0, 1110.0], "about 20.0 s"),
        (62, [1010.0, 1030.0], "about 20 min"),
        (2, [1010.0, 1030.0], NOTHING),
    ],
    ids=["no round", "one round", "newest pace", "minutes", "all done"],
)
def test_the_pace_is_that_of_the_newest_rounds(planned: int, commits: list[float], expected: str) -> None:
    """The first round's is taken from the creation of the run; a long estimate is in whole minutes."""
    rounds = [committed(number, committed=at) for number, at in enumerate(commits)]
    assert left_of_run(run_of(planned, len(commits)), rounds) == expected
