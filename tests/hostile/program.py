"""`python -m tests.hostile --seconds 120`: all attacks at once during honest runs; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from pathlib import Path

from tests.hostile.all_at_once import names, play
from tests.hostile.federation import Federation
from tests.processes.process import Workspace


def main() -> int:
    """Run all attacks and print the result; exit code 1 if a promise did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--attack", action="append", choices=names(), help="this one alone; may be repeated")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the folder would stay
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, Workspace(Path(folder)) as workspace:
        result = play(Federation(workspace), arguments.seconds, arguments.attack or names())
    print(json.dumps(result.as_json(), indent=2))
    return 0 if result.same_bits and not result.failed else 1
