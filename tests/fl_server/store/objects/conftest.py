"""Object stores to test: every one runs the same tests."""

from pathlib import Path

import pytest

from fl_server.settings.sections import ObjectsConfig
from fl_server.store.objects.bucket import Bucket
from tests.s3_server import S3Server

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")


def s3_bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch, retry_s: float = 10) -> Bucket:
    """A new bucket of the server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return Bucket(f"s3://{server.new_bucket()}/some/prefix", ObjectsConfig(endpoint=server.endpoint, retry_s=retry_s))


def folder_bucket(folder: Path) -> Bucket:
    """A new folder as an object store."""
    folder.mkdir()
    return Bucket(f"file://{folder}", ObjectsConfig(retry_s=0))


# Swift takes seconds to start.
@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty object store of each kind."""
    if request.param == "folder":
        return folder_bucket(tmp_path / "objects")
    return s3_bucket(request.getfixturevalue("s3"), monkeypatch)
