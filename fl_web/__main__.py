"""The web process of a coordinator, which starts it: `python -m fl_web`, with settings as a line of JSON on its input.

It ends when its input is closed, so it never outlives the coordinator. It opens no file but those of its code, and no
connection but that to the coordinator's socket. Its certificate and key are in the settings; a further line of settings
has renewed ones.
"""

import sys

from fl_common.certificates.tls_version import set_oldest_tls
from fl_common.program import silence_libraries
from fl_web.sandbox import code_of_this_process, restrict


def main() -> int:
    """Serve until the input ends."""
    silence_libraries()
    set_oldest_tls("1.3")
    line = sys.stdin.buffer.readline()
    if not line.strip().startswith(b"{"):
        print("fl_web: expected settings from a coordinator: set web_listen in its server.toml", file=sys.stderr)
        return 2
    if why := restrict(code_of_this_process()):
        print(
            f"fl_web: can read what its user can read, because the kernel restricts no process: {why}", file=sys.stderr
        )
    # Imported here: a restriction holds for the threads that are started after it.
    from fl_web.process import run

    return run(line, iter(sys.stdin.buffer.readline, b""))


if __name__ == "__main__":
    sys.exit(main())
