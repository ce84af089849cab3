"""`fl release`: what cannot be released is refused before a byte of it is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_common.signatures import make_key
from protos.fl.v1 import admin_pb2
from tests.fl_ops.conftest import FakeAdmin, Fl


@pytest.mark.parametrize("form", ["onnx", "whole"])
def test_a_graph_of_a_run_with_personal_parameters_is_refused(
    admin: FakeAdmin, fl: Fl, tmp_path: Path, form: str
) -> None:
    """A graph has all values, and the personal ones are different on each device. The form `whole` leaves them out."""
    make_key(tmp_path / "key.pem")
    spec = admin_pb2.RunSpec(task=admin_pb2.TaskSpec(name="digits"), personal=["head.*"])
    run = admin_pb2.RunStatus(run_id="digits-1", spec=spec)
    admin.responses["GetRun"] = admin_pb2.GetRunResponse(run=run)
    admin.responses["ListReleases"] = admin_pb2.ListReleasesResponse()
    admin.responses["ExportModel"] = []
    done = fl("release", "digits-1", "--format", form, "--sign-key", tmp_path / "key.pem")
    assert done.exit_code != 0
    refused = "personal parameters (head.*) are different on each device" in " ".join(done.stderr.split())
    fetched = any(isinstance(request, admin_pb2.ExportModelRequest) for request in admin.requests)
    assert (refused, fetched) == ((True, False) if form == "onnx" else (False, True))
