"""A package that cannot be loaded is a reason, not a daemon that waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_client.errors import StateError
from fl_client.packages.child import Installed
from fl_client.packages.trainer import PackageTrainer
from fl_client.settings.config import ClientConfig
from tests.marks import slow_except

CODE = {
    "hangs": ("import time\nwhile True:\n    time.sleep(1)\n", "timed out"),
    "raises": ("raise RuntimeError('no sensor')\n", "no sensor"),
    "exits": ("import os\nos._exit(7)\n", "code 7"),
    "lacks": ("", "Slow"),
}


@pytest.mark.parametrize("kind", slow_except(CODE, "raises"))
def test_a_package_that_cannot_be_loaded_is_refused(tmp_path: Path, kind: str) -> None:
    """Its process is ended, and the error names the package and the cause."""
    code, words = CODE[kind]
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / f"{kind}_task.py").write_text(code)
    config = ClientConfig.model_validate(
        {
            "client_id": "edge-1", "server": "127.0.0.1:1", "state_dir": tmp_path, "insecure": True, "policy": "p",
            "device": "cpu", "packages": {"start_s": 15.0 if kind == "hangs" else 300.0},
            "tasks": [{"name": f"{kind}_task:Slow", "package": kind}],
        }
    )  # fmt: skip
    package = Installed("sha256:0", f"the package {kind}", folder, 0)
    with pytest.raises(StateError, match=f"(?s)the package {kind} cannot be loaded.*{words}"):
        PackageTrainer(config, package, torch.device("cpu"))
