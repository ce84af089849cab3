"""`python -m tests.soak --minutes 30 --daemons 20 --seed 1`: a line for each sample, then all that was found as JSON.

Exits with 1 when something leaked. The lines go to stderr, the JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.integration.processes import Place
from tests.soak.plan import Plan
from tests.soak.soak import Soak, summary


def plan_of(arguments: list[str] | None = None) -> Plan:
    """The plan that a command line asks for."""
    parser = argparse.ArgumentParser("python -m tests.soak", description="Daemons come and go; does anything leak?")
    parser.add_argument("--minutes", type=float, default=Plan.minutes)
    parser.add_argument("--daemons", type=int, default=Plan.daemons, help="at most so many at a time, 4 or more")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--every", type=float, default=Plan.every_s, help="seconds between two samples")
    given = parser.parse_args(arguments)
    if given.daemons < 4:
        parser.error(f"--daemons: expected 4 or more, got {given.daemons}: a round wants three")
    return Plan(minutes=given.minutes, daemons=given.daemons, seed=given.seed, every_s=given.every)


def main() -> int:
    """Soak, tell, and say by the exit code whether anything leaked."""
    plan = plan_of()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Place(Path(folder)) as place:
        soak = Soak(place, plan, lambda line: print(line, file=sys.stderr, flush=True))
        found = summary(soak, soak.run())
    print(json.dumps(found, indent=1))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
