"""A long run goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

from tests.deterministic.batches import Batch
from tests.deterministic.standing import standing_of


def test_a_long_run_leaves_out_the_lives_that_are_done(tmp_path: Path) -> None:
    """Lives of the same depth and range are counted by commit, with each failure's command, and not lived again."""
    results = tmp_path / "lives.jsonl"
    failed = {115: ["FAILED: the command", "what", "few"]}
    done = [
        ("a", [120, 130], Batch(1, 10)), ("b", [110, 120], Batch(1, 10, failed=failed)), ("b", [100, 105], Batch(1, 5)),
        ("a", [130, 140], Batch(2, 10)), ("a", [10, 20], Batch(1, 10)),
    ]  # fmt: skip
    lines = [json.dumps({"seeds": seeds, "commit": commit, **batch.values()}) for commit, seeds, batch in done]
    results.write_text("\n".join(lines))
    standing = standing_of(results, 1, range(100, 200))
    assert standing.left() == [range(105, 110), range(130, 200)]
    first, *rest = standing.lines()
    assert first == "depth 1, seeds 100:200: 25 of 100 lives"
    assert [line.split(",")[0].strip() for line in rest] == [
        "commit a: 10 lives", "commit b: 15 lives", "FAILED: the command", "the same command goes on with seed 105",
    ]  # fmt: skip
