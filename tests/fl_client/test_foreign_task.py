"""A daemon runs its own task and no other: a name from the wire is compared, never looked up."""

from __future__ import annotations

import sys

import pytest

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that a module on the daemon's path makes when it is imported."""
    path = tmp_path / "marker"
    (tmp_path / "evil_task.py").write_text(f"import pathlib\npathlib.Path({str(path)!r}).touch()\nclass Evil: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    return path


@pytest.mark.parametrize("name", ["evil_task:Evil", "subprocess:run", "digits"])
async def test_a_task_of_the_coordinator_s_choice_is_not_loaded(fleet, coordinator, marker, name):
    """Training and evaluation of another task are refused, nothing is imported, and the daemon does its own work on."""
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
    assert not marker.exists()
    assert not {module for module in set(sys.modules) - before if module.partition(".")[0] in ("evil_task", "sklearn")}
