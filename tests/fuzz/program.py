"""The command `python -m tests.fuzz`: fuzzes parsers in this process, a live coordinator and a daemon.

Every input is a function of the seed, which is printed; the same --seed makes the same inputs again. Inputs that fail
are written to build/fuzz. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from tests.fuzz import hostile_answers
from tests.fuzz.all_parsers import GROUPS, all_parsers
from tests.fuzz.in_process import MOST_GROWTH_MIB, Tally, play
from tests.fuzz.live import campaign
from tests.processes.process import Workspace

FOUND = Path("build/fuzz")
REPORT_S = 30.0


def main() -> int:
    """Fuzz, and print the counts as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together")
    parser.add_argument("--inputs", type=int, help="inputs in this process, in place of a time")
    parser.add_argument("--calls", type=int, help="live calls, in place of a time")
    parser.add_argument("--messages", type=int, help="to a daemon, in place of a time")
    parser.add_argument("--seed", type=int, help="of an earlier run; default: a new one")
    parser.add_argument("--part", choices=["parsers", "live", "daemon"], action="append", help="default: all")
    parser.add_argument("--group", choices=list(GROUPS), action="append", help="of parsers; default: all")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    _show(f"seed {seed}: repeat it with SEED={seed}")
    parts = arguments.part or ["parsers", "live", "daemon"]
    seconds = 60.0 * arguments.minutes / len(parts)
    results = {}
    for part in parts:
        results[part] = _PARTS[part](arguments, seed, seconds)
        _show(json.dumps({part: results[part]}, indent=2))
    return 1 if any(result["failures"] for result in results.values()) else 0


def _show(text: str, file: TextIO | None = None, *, flush: bool = True) -> None:
    print(text, file=file, flush=flush)


def _parsers(arguments: Any, seed: int, seconds: float) -> dict[str, Any]:
    ends, began, shown = time.monotonic() + seconds, time.monotonic(), [time.monotonic()]

    def over(tally: Tally) -> bool:
        if time.monotonic() - shown[0] > REPORT_S:
            shown[0] = time.monotonic()
            _show(f"{tally.total:,} inputs, {len(tally.failures)} failures", file=sys.stderr)
        return time.monotonic() > ends if arguments.inputs is None else tally.total >= arguments.inputs

    with all_parsers(*(arguments.group or ())) as parsers:
        tally = play(parsers, seed, over)
    failures = [f"{each.save(FOUND)}, input {each.number}: {each.error}" for each in tally.failures]
    if tally.growth_mib > MOST_GROWTH_MIB:
        failures.append(f"memory grew by {tally.growth_mib:.0f} MiB")
    return {
        "inputs": tally.total, "seconds": round(time.monotonic() - began), "growth_mib": round(tally.growth_mib, 1),
        "by_parser": dict(sorted(tally.inputs.items())), "results": dict(sorted(tally.results.items())),
        "failures": failures,
    }  # fmt: skip


def _live(arguments: Any, seed: int, seconds: float) -> dict[str, Any]:
    ends, began = time.monotonic() + seconds, time.monotonic()

    def over(calls: int, failures: int) -> bool:
        _show(f"{calls:,} live calls, {failures} failures", file=sys.stderr)
        return time.monotonic() > ends if arguments.calls is None else calls >= arguments.calls

    with tempfile.TemporaryDirectory(prefix="fuzz-live-") as folder, Workspace(Path(folder)) as workspace:
        result = campaign.play(campaign.FuzzedFederation(workspace, **campaign.SETTINGS), seed, over)
    return {
        "calls": result.called.calls.total(), "seconds": round(time.monotonic() - began),
        "honest_runs": result.honest_runs, "growth_mib": round(result.growth_mib, 1),
        "by_method": dict(sorted(result.called.calls.items())), "codes": dict(sorted(result.called.codes.items())),
        "frames": dict(sorted(result.frames.items())), "failures": result.failures,
    }  # fmt: skip


def _daemon(arguments: Any, seed: int, seconds: float) -> dict[str, Any]:
    ends, began = time.monotonic() + seconds, time.monotonic()

    def over(sent: int) -> bool:
        _show(f"{sent:,} messages to a daemon", file=sys.stderr)
        return time.monotonic() > ends if arguments.messages is None else sent >= arguments.messages

    with tempfile.TemporaryDirectory(prefix="fuzz-daemon-") as folder:
        result = hostile_answers.play(Path(folder), seed, over)
    return {
        "messages": result.sent.total(), "seconds": round(time.monotonic() - began), "rounds": result.rounds,
        "growth_mib": round(result.growth_mib, 1), "by_kind": dict(sorted(result.sent.items())),
        "failures": result.failures,
    }  # fmt: skip


_PARTS = {"parsers": _parsers, "live": _live, "daemon": _daemon}
