"""What a child process of the demo runs: a program, until it ends or the demo does, also by SIGKILL."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from fl_ops.worker_process import end_with_parent


def run(program: str, config: Path, log: Path) -> None:
    """Run `program --config config` as `python -m` does, with its output in `log`."""
    os.setsid()  # Ctrl-C goes to the demo only, which then ends its children.
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    end_with_parent()  # without an orderly shutdown: its state is deleted anyway
    sys.argv = [program, "--config", str(config)]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
