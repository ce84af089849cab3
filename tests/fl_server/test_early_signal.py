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
        if name == "torch":  # the longest part of loading
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Signal())
sys.exit(main(["--config", sys.argv[1]]))
"""


def test_a_coordinator_that_loads_stops_at_sigterm(tmp_path: Path) -> None:
    """The first process of a container would otherwise ignore SIGTERM; here its default action is tested."""
    settings = tmp_path / "server.toml"
    settings.write_text(f'state_dir = "{tmp_path / "state"}"\ninsecure = true\n')
    command = [sys.executable, "-c", PROGRAM, str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "state").exists()
