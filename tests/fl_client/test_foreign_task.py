"""A daemon runs its own task and no other: a name from the wire is compared, never looked up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from tests.fl_client.fake_coordinator import FakeCoordinator
from tests.fl_client.fleet import Fleet


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a module on the daemon's path creates on import."""
    path = tmp_path / "marker"
    (tmp_path / "evil_task.py").write_text(f"import pathlib\npathlib.Path({str(path)!r}).touch()\nclass Evil: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    return path


@pytest.mark.parametrize("name", ["evil_task:Evil", "subprocess:run", "digits"])
async def test_a_task_of_the_coordinator_s_choice_is_not_loaded(
    fleet: Fleet, coordinator: FakeCoordinator, marker: Path, name: str
) -> None:
    """Training and evaluation of another task are refused, nothing is imported, and the daemon's own work continues."""
    assignment = coordinator.assignment()
    assignment.task = name
    evaluation = training_pb2.EvaluationAssignment(
        key=assignment.key, task=name, fingerprint=assignment.fingerprint, resources=assignment.resources
    )
    before = set(sys.modules)
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=assignment)
        coordinator.push(evaluation=evaluation)
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    (failure,) = coordinator.calls["ReportStatus"][0].failures
    assert (failure.reason, failure.message) == (
        pb.FAILURE_REASON_UNSUPPORTED, f"expected task 'tiny', got {name!r}",
    )  # fmt: skip
    assert not coordinator.calls["ReportEvaluation"]
    assert not marker.exists()  # noqa: ASYNC240 - one check of a temporary folder
    assert not {module for module in set(sys.modules) - before if module.partition(".")[0] in ("evil_task", "sklearn")}
