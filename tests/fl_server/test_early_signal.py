"""SIGTERM before the coordinator serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys
from fl_server.__main__ import main

class Signal:
    def find_spec(self, name, path, target=None):
        if name == "fl_server.app":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Signal())
sys.exit(main(["--config", sys.argv[1]]))
"""


def test_it_leaves_in_good_order_while_it_loads(tmp_path: Path) -> None:
    """As the first process of a container it would otherwise be deaf until SIGKILL; here the signal's default shows."""
    settings = tmp_path / "server.toml"
    settings.write_text(f'state_dir = "{tmp_path / "state"}"\ninsecure = true\n')
    command = [sys.executable, "-c", PROGRAM, str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "state").exists()
