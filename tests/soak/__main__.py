"""`python -m tests.soak --minutes 30 --daemons 20 --seed 1`: a line for each sample, then the results as JSON.

Exits with 1 when something leaked. The lines go to stderr, the JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from tests.processes.process import Workspace
from tests.soak.plan import Plan
from tests.soak.soak import Soak, summary


def plan_of(arguments: list[str] | None = None) -> Plan:
    """The plan of a command line."""
    parser = argparse.ArgumentParser(
        "python -m tests.soak", description="Start and stop daemons for a long time and look for leaks."
    )
    parser.add_argument("--minutes", type=float, default=Plan.minutes)
    parser.add_argument("--daemons", type=int, default=Plan.daemons, help="largest number at a time, 4 or more")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--every", type=float, default=Plan.every_s, help="seconds between two samples")
    given = parser.parse_args(arguments)
    if given.daemons < 4:
        parser.error(f"--daemons: expected 4 or more, got {given.daemons}: a round needs three")
    return Plan(minutes=given.minutes, daemons=given.daemons, seed=given.seed, every_s=given.every)


def main() -> int:
    """Soak and print the summary; the exit code is 1 after a leak."""
    plan = plan_of()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the soak's folder would stay
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Workspace(Path(folder)) as workspace:
        soak = Soak(workspace, plan, lambda line: print(line, file=sys.stderr, flush=True))
        found = summary(soak, soak.run())
    print(json.dumps(found, indent=1))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
