"""Walks from an empty machine to a trained model by each template of `fl new`, and by Flower's quickstart.

    python -m distribution.release --no-demo                  # makes the wheel in dist, or name another one
    python -m benchmarks.newcomer dist/impetus_fl-*.whl       # all ways, in turn, one sitting
    python -m benchmarks.newcomer dist/impetus_fl-*.whl --only tabular flower --repeats 3

Each way has a new folder, a new environment and an empty home, so nothing is cached; packages come from the index of
this machine's pip. Prints a JSON line for each walk, then the rows of the table. A way without a model is an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.demo_grid import machine
from benchmarks.newcomer.paths import TEMPLATES, Way, flower, own
from benchmarks.newcomer.walk import Lost, Walked, walk
from benchmarks.table import markdown


def table(walks: Mapping[str, Sequence[Walked]]) -> list[str]:
    """A row for each way: medians."""
    rows = []
    for name, walked in walks.items():
        minutes, installing = (
            statistics.median(getattr(one, field) for one in walked) for field in ("minutes", "installing_minutes")
        )
        rows.append(
            {
                "": name + (", stand-in for its template" if walked[0].stand_in else ""),
                "commands": str(walked[0].commands),
                "minutes": f"{minutes:.1f}",
                "of these installing": f"{installing:.1f}",
                "environment": f"{walked[0].environment_mb:,} MB",
            }
        )
    return markdown(rows)


def main() -> int:
    """Walk the ways and print what they took. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*TEMPLATES, "flower"], default=[*TEMPLATES, "flower"])
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    if not options.wheel.is_file():
        parser.error(f"expected the wheel of a release, got {options.wheel}: python -m distribution.release makes it")
    python = Path(sys.base_prefix, "bin", "python3")
    wheel = options.wheel.resolve()
    ways: list[Way] = [flower() if name == "flower" else own(name, wheel) for name in options.only]
    walks: dict[str, list[Walked]] = defaultdict(list)
    code = 0
    for _ in range(options.repeats):
        for way in ways:
            try:
                walked = walk(way, python)
            except Lost as error:
                print(error, file=sys.stderr, flush=True)
                code = 1
                continue
            walks[way.name].append(walked)
            when = datetime.now(UTC).isoformat(timespec="seconds")
            print(json.dumps({**walked.as_json(), "machine": machine(), "when": when}), flush=True)
    print("\n".join(table(walks)))
    return code


if __name__ == "__main__":
    sys.exit(main())
