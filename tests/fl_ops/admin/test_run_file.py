"""A run's TOML file: read, sent, and refused where it cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_ops.errors import UsageError
from fl_ops.files import read_run
from protos.fl.v1 import admin_pb2
from tests.fl_ops.conftest import FakeAdmin, Fl


def test_missing_file(tmp_path: Path) -> None:
    """A path without a file is named."""
    with pytest.raises(UsageError, match=r"there is no file .*run\.toml"):
        read_run(tmp_path / "run.toml")


def test_not_toml(tmp_path: Path) -> None:
    """A file that is no TOML is refused with its place."""
    (tmp_path / "run.toml").write_text("x = 1\nname = what")
    with pytest.raises(UsageError, match=r"run\.toml cannot be read as TOML: .*line 2"):
        read_run(tmp_path / "run.toml")


def test_create_sends_the_file(admin: FakeAdmin, fl: Fl, tmp_path: Path) -> None:
    """`fl run create` sends the content of the file; --name overrides the file's name."""
    (tmp_path / "run.toml").write_text('name = "digits"\n[task]\nname = "digits"')
    admin.responses["CreateRun"] = admin_pb2.CreateRunResponse(run=admin_pb2.RunStatus(run_id="other"))
    assert fl("run", "create", "run.toml", "--name", "other").exit_code == 0
    expected = admin_pb2.RunSpec(name="other", task=admin_pb2.TaskSpec(name="digits"))
    assert admin.requests == [admin_pb2.CreateRunRequest(spec=expected)]


def test_create_refuses_before_calling(admin: FakeAdmin, fl: Fl, tmp_path: Path) -> None:
    """A wrong file exits with 2 and reaches no coordinator."""
    (tmp_path / "run.toml").write_text("sede = 1")
    assert fl("run", "create", "run.toml").exit_code == 2
    assert admin.requests == []
