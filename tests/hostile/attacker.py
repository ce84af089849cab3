"""`python -m tests.hostile.attacker NAME SECONDS TARGET`: one attack, in a process of its own.

Nothing is imported before `main`, which sets the oldest TLS version before grpc is imported.
"""

import json
import sys


def main() -> None:
    """Run the attack with this name. TARGET: the fields of a Target as JSON."""
    from tests.processes import forks  # noqa: PLC0415 - sets the oldest TLS version of this process

    del forks
    from tests.hostile import all_at_once  # noqa: PLC0415

    all_at_once.attack(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))


if __name__ == "__main__":
    main()
