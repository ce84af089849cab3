"""What a child process of the demo runs: a program, until it ends or the demo does, also by SIGKILL."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import threading
from pathlib import Path

ORPHANED = 1


def run(program: str, config: Path, log: Path) -> None:
    """Run `program --config config` as `python -m` does, with its output in `log`."""
    os.setsid()  # Ctrl-C goes to the demo only, which then ends its children.
    with log.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    sys.argv = [program, "--config", str(config)]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    # Without an orderly shutdown: its state is deleted anyway.
    os._exit(ORPHANED)
