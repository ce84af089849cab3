"""What the tests of packages need: the task as the coordinator's operator installs it, and the key of packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_common.signatures import SigningKey, make_key
from tests.processes.process import HERE, Workspace
from tests.processes.wheels import sources


@pytest.fixture
def modules(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the package's modules, as the coordinator's operator installs them there."""
    folder = workspace.folder / "installed"
    folder.mkdir()
    for name, text in sources().items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def key(workspace: Workspace) -> SigningKey:
    """The key that signs packages."""
    return make_key(workspace.folder / "key.pem")
