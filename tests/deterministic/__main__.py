"""`python -m tests.deterministic --depth 2 --seeds 0:100`: live the lives of these seeds, and check each.

A life that fails prints the command that repeats it, what was violated, and the fewest of its faults that are enough.
The last line is a summary in JSON. The exit status is the number of failed lives, 99 at most. A long run is
`--depth 1 --seeds 0:1000000 --processes 16 --results lives.jsonl --seconds 500`: the same command again goes on with
the seeds that the file has not, and says where it stands.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.deterministic import clocks
from tests.deterministic.batches import SIZES, Batch, batches, live_batch
from tests.deterministic.first_seeds import FOUND, PLANTED
from tests.deterministic.standing import commit_id, standing_of

HASH_SEED = "0"
"""Sets of texts have one order in every process."""


def main() -> int:
    """Run the command."""
    clocks.require_first()
    options = _options()
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if options.planted:
        return _planted(seeds)
    began, all_lives, commit = time.monotonic(), Batch(options.depth), commit_id()
    standing = standing_of(options.results, options.depth, seeds)
    known = [part for part in known_seeds() if options.known and part.start not in seeds]
    for part, batch in _lived(options, [*standing.left(), *known]):
        all_lives.add(batch)
        standing.add(commit, part, batch)
        for lines in batch.failed.values():
            print(*lines, sep="\n", flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps({"seeds": [part.start, part.stop], "commit": commit, **batch.values()}) + "\n")
    print(*standing.lines(), sep="\n")
    seconds = round(time.monotonic() - began, 2)
    print(json.dumps({"seeds": options.seeds, "seconds": seconds, **all_lives.values()}), flush=True)
    return min(len(all_lives.failed), 99)


def known_seeds() -> list[range]:
    """The seeds of the lives that find a planted fault, or have found one, each as a range of its own. Depth 2.

    Raises TypeError if one of the faults does not fit the code that it is planted into.
    """
    from tests.deterministic.planted import patched
    from tests.deterministic.planted_system import PLANTED as FAULTS

    for fault in FAULTS.values():
        with patched(fault()):
            pass
    return [range(seed, seed + 1) for seed in sorted({*FOUND, *(seed for _, seed in PLANTED[2].values())})]


def _planted(seeds: range) -> int:
    """Print what finds each fault that is planted into the whole system. Returns how many are not found."""
    from tests.deterministic.planted_system import found_by

    found = {name: found_by(name, check, (seed, *seeds)) for name, (check, seed) in PLANTED[2].items()}
    print(json.dumps(found), flush=True)
    return list(found.values()).count(None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.deterministic", description=__doc__)
    parser.add_argument("--depth", type=int, choices=(1, 2), default=2, help="1: the core; 2: the whole system")
    parser.add_argument("--seeds", default="0:50", help="first:end, or one seed")
    parser.add_argument("--processes", type=int, default=1, help="live so many lives beside each other")
    parser.add_argument("--batch", type=int, default=0, help="lives of one batch; 0: about as many as a second has")
    parser.add_argument("--results", type=Path, help="leave out the lives of this file, and add a line for each batch")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no batch after this time")
    parser.add_argument("--known", action="store_true", help="live those that find planted faults too")
    parser.add_argument("--planted", action="store_true", help="live with each planted fault until it is found")
    parser.add_argument("--log", action="store_true", help="print what happens, with virtual times")
    return parser.parse_args()


def _lived(options: argparse.Namespace, left: list[range]) -> Iterator[tuple[range, Batch]]:
    size = options.batch or SIZES[options.depth]
    parts = (seeds[at : at + size] for seeds in left for at in range(0, len(seeds), size))
    if options.processes > 1:
        yield from batches(options.depth, parts, options.processes, options.seconds)
        return
    ends = time.monotonic() + options.seconds
    for part in parts:
        if time.monotonic() < ends:
            yield part, live_batch(options.depth, part, log=options.log)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(  # noqa: S606 - this program again
            sys.executable, [sys.executable, "-m", "tests.deterministic", *sys.argv[1:]]
        )
    with tempfile.TemporaryDirectory(prefix="lives-") as folder:  # certificates too: nothing below is left
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        code = main()
    sys.stdout.flush()
    os._exit(code)  # killed lives leave objects half-way: Python's own end over them once ended with signal 11
