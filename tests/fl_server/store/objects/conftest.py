"""Object stores to test: every one runs the same tests."""

from pathlib import Path

import pytest

from fl_server.settings.sections import ObjectsConfig
from fl_server.store.objects.bucket import Bucket
from tests.emulated_stores import StoreServer

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")


def server_bucket(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket of the server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    settings = ObjectsConfig(endpoint=server.endpoint, retry_s=10)
    return Bucket(f"{server.scheme}://{server.new_bucket()}/some/prefix", settings)


def folder_bucket(folder: Path) -> Bucket:
    """A new folder as an object store."""
    folder.mkdir()
    return Bucket(f"file://{folder}", ObjectsConfig(retry_s=0))


# The servers take seconds to start.
@pytest.fixture(params=["folder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("s3", "az", "gs"))])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty object store of each kind. That of Google's kind checks no access."""
    if request.param == "folder":
        return folder_bucket(tmp_path / "objects")
    return server_bucket(request.getfixturevalue(request.param), monkeypatch)
