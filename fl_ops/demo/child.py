"""One of our programs as a child that ends with its parent: `python -m fl_ops.demo.child fl_server --config FILE`.

The parent holds the other end of this process's stdin and never writes. However the parent ends, SIGKILL included, the
kernel closes that end, and the read here returns. That holds on Linux and macOS alike, and does not depend on which of
the parent's threads started the child, as a parent-death signal would.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading

ORPHANED = 1


def main() -> None:
    """Runs the program named first, with the other arguments as its own."""
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    # At once: what a program does when told to stop would be done for nobody.
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
