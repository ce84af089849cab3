"""The head of a run's page."""

from __future__ import annotations

import pytest

from fl_web.rendering import rendered
from protos.fl.v1 import admin_pb2 as pb


def head(run: pb.RunStatus, *, may_export: bool = True) -> str:
    """The head as the page has it."""
    return rendered("run/_head.html", {"run": run, "may_export": may_export, "rounds": []})


@pytest.mark.parametrize(
    ("start", "done", "may_export", "shown"),
    [
        pytest.param(0, 1, True, True, id="from-the-first-round"),
        pytest.param(0, 1, False, False, id="not-for-this-caller"),
        pytest.param(2, 2, True, False, id="before-its-start"),
        pytest.param(2, 3, True, True, id="after-its-start"),
        pytest.param(None, 3, True, False, id="run-without-one"),
    ],
)
def test_the_averaged_model_has_a_link_if_there_is_one(
    start: int | None, done: int, may_export: bool, shown: bool
) -> None:
    """For callers that may export, from the first round with an averaged model on."""
    run = pb.RunStatus(run_id="wards", rounds_done=done, state=pb.RUN_STATE_RUNNING)
    if start is not None:
        run.spec.averaging.start = start
    link = '<a href="/runs/wards/model?round=latest&model=averaged" download'
    assert (link in head(run, may_export=may_export)) == shown
