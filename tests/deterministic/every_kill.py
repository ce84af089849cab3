"""`python -m tests.deterministic.every_kill --who server --every 5`: kills at the writes of one round.

The round is lived once, and then once for each write of one process, after which that process is killed; one that
writes a file dies in the middle of it, too. The model must be the same. The exit status is the number of lives in which
it was not. The round has secure aggregation, or with --records privacy of records. With --abandoned two clients go away
when all have sent their shares, so that the first draw of a secure round is given up with the masked updates of two.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tests.deterministic import clocks
from tests.deterministic.plan import RECORDS, SERVER, Fault, Plan, secure_job

CREATED_S, AWAY_S = 2.0, 5.1
"""Virtual seconds after which a kill may come: the clients have registered, and the run is being created. With
--abandoned the second: shares are sent, and two clients of the draw go away."""
AWAY = ("c-0", "c-4")
MOST = 400
"""Writes of a process within a life, at most."""


def plan_of(kills: tuple[Fault, ...], *, abandoned: bool, records: bool = False) -> Plan:
    """A run of one round with these kills."""
    job = RECORDS if records else secure_job()
    sections = {**job.sections, "stop": {"rounds": 1}, "evaluation": {"clients_every": 0}}
    away = [Fault("block", client, AWAY_S, seconds=400.0) for client in AWAY if abandoned]
    clients = tuple(f"c-{number}" for number in range(3 if records else 6))
    return Plan(1, replace(job, sections=sections), clients, (*away, *kills))


def outcome(plan: Plan) -> tuple[object, bool, str]:
    """(models of a life, whether a kill happened, what was violated). A draw with another number has other batches."""
    from tests.deterministic.living import live  # noqa: PLC0415 - only in a process whose clocks are virtual

    result = live(plan)
    return result.seen.commits, result.seen.happened["kill"] > 0, result.error


def kills(who: str, every: int, at: float) -> Iterator[Fault]:
    """The kills of a process after a time, one after the other."""
    for number in range(0, MOST, every):
        for how in ("after", "torn"):
            yield Fault("kill", who, at, number=number, how=how, seconds=1.0)


def main() -> int:
    """Run the command."""
    clocks.require_first()
    parser = argparse.ArgumentParser(prog="python -m tests.deterministic.every_kill", description=__doc__)
    parser.add_argument("--who", default=SERVER, help="the process that is killed: server, or c-0 and so on")
    parser.add_argument("--every", type=int, default=1, help="one of so many writes")
    parser.add_argument("--abandoned", action="store_true", help="the first draw of the round is given up")
    parser.add_argument("--records", action="store_true", help="a round with privacy of records")
    options = parser.parse_args()
    plan = partial(plan_of, abandoned=options.abandoned, records=options.records)
    expected, _, error = outcome(plan(()))
    wrong, lives = {"undisturbed": error} if error else {}, 0
    for kill in kills(options.who, options.every, AWAY_S if options.abandoned else CREATED_S):
        got, happened, error = outcome(plan((kill,)))
        if not happened:
            break
        lives += 1
        if error or got != expected:
            wrong[str(kill)] = error or f"{got}, not {expected}"
    text = json.dumps({"lives": lives, "expected": str(expected), "wrong": wrong})
    print(text, flush=True)  # noqa: T201 - the output of the command
    return min(len(wrong), 99)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.deterministic.every_kill", *sys.argv[1:]])  # noqa: S606
    with tempfile.TemporaryDirectory(prefix="lives-") as folder:  # certificates too: nothing below is left
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        code = main()
    sys.stdout.flush()
    os._exit(code)
