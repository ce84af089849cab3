"""`python -m tests.chaos --seeds 200`: see program.py.

Nothing is imported before `main`: the coordinators that it forks import this module first, and set their oldest TLS
version before grpc is imported.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run it. Returns the exit code."""
    from tests.processes import forks  # sets the oldest TLS version of this process

    forks.context()
    from tests.chaos import program

    return program.main()


if __name__ == "__main__":
    sys.exit(main())
