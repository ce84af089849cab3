"""fl-client, but SIGKILL ends it before its nth change of a file in the folder of its certificate, after the start.

The environment has KILL_AT, the number n, and KILL_IN, the folder.
"""

from __future__ import annotations

import os
import signal
import sys

FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"}
"""Audit events of Python before a change of a file."""
_WRITES = os.O_WRONLY | os.O_RDWR


def kill_at(step: int, folder: str) -> None:
    """Watch this process from now on."""
    left = step

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event not in FILE_EVENTS or folder not in str(arguments[:2]):
            return
        if event == "open" and not int(str(arguments[2])) & _WRITES:
            return
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


if __name__ == "__main__":
    from fl_client.__main__ import main

    kill_at(int(os.environ["KILL_AT"]), os.environ["KILL_IN"])
    sys.exit(main())
