"""The web process of a coordinator, which starts it: `python -m fl_web`, with settings as a line of JSON on its input.

It ends when its input is closed, so it never outlives the coordinator. It opens no file but those of the certificate,
and no connection but that to the coordinator's socket.
"""

import os
import sys
import threading
import time

from fl_common.certificates.tls_version import set_oldest_tls

_END_S = 3.0
"""After this long without an end the process ends at once."""


def main() -> int:
    """Serve until the input ends."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    set_oldest_tls("1.3")
    line = sys.stdin.buffer.readline()
    if not line.strip().startswith(b"{"):
        print("fl_web: expected settings from a coordinator: set web_listen in its server.toml", file=sys.stderr)
        return 2
    from fl_web.process import run

    def until_closed(end: threading.Event) -> None:
        while sys.stdin.buffer.read(4096):
            pass
        end.set()
        time.sleep(_END_S)
        os._exit(0)

    return run(line, until_closed)


if __name__ == "__main__":
    sys.exit(main())
