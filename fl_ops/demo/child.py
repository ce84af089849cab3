"""Runs a program as a child that ends with its parent: `python -m fl_ops.demo.child fl_server --config FILE`.

The parent keeps the other end of this process's stdin open and never writes. When the parent ends, also by SIGKILL,
the kernel closes that end, and the read here returns. This works on Linux and macOS, and for children that any thread
of the parent started; a parent-death signal depends on the thread.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading

ORPHANED = 1


def main() -> None:
    """Run the module named by the first argument, with the remaining arguments."""
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    # Without an orderly shutdown: its state is deleted anyway.
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
