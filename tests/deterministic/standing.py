"""Where a long run stands: the lives that a file of results has, by commit of the code, and the seeds that are left."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.deterministic.batches import Batch

ROOT = Path(__file__).parents[2]


def commit_id() -> str:
    """The commit of this tree, with "-dirty" if a file differs from it. Empty outside of a repository."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


@dataclass
class Standing:
    """A range of seeds, and which of its lives are done."""

    depth: int
    seeds: range
    done: list[range] = field(default_factory=list)
    by_commit: dict[str, Batch] = field(default_factory=dict)

    def add(self, commit: str, part: range, batch: Batch) -> None:
        """Count lives that were lived with the code of a commit. Those with other seeds are not counted."""
        if part.start in self.seeds and part[-1] in self.seeds:
            self.done.append(part)
            self.by_commit.setdefault(commit, Batch(self.depth)).add(batch)

    def left(self) -> list[range]:
        """The seeds that were not lived, in order."""
        parts, at = [], self.seeds.start
        for part in sorted(self.done, key=lambda part: part.start):
            parts.append(range(at, part.start))
            at = max(at, part.stop)
        return [part for part in (*parts, range(at, self.seeds.stop)) if part]

    def lines(self) -> Iterable[str]:
        """The standing as text: sums by commit, each failure with the command that repeats it, and the next seed."""
        lives = sum(batch.lives for batch in self.by_commit.values())
        yield f"depth {self.depth}, seeds {self.seeds.start}:{self.seeds.stop}: {lives:,} of {len(self.seeds):,} lives"
        for commit, batch in self.by_commit.items():
            yield (
                f"    commit {commit}: {batch.lives:,} lives, {batch.happened.total():,} faults,"
                f" {len(batch.failed)} failed, {batch.processor_s:,.0f} s of processor time"
            )
        for batch in self.by_commit.values():
            yield from (f"    {lines[0]}" for lines in batch.failed.values())
        left = self.left()
        yield f"    the same command goes on with seed {left[0].start}" if left else "    all are done"


def standing_of(results: Path | None, depth: int, seeds: range) -> Standing:
    """What a file of results has of these lives. A file that is not there has none."""
    standing = Standing(depth, seeds)
    if results is not None and results.exists():
        for line in map(json.loads, results.read_text().splitlines()):
            if line["depth"] == depth:
                standing.add(line["commit"], range(*line["seeds"]), Batch.of(line))
    return standing
