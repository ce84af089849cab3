"""`fl partition`: the file that devices are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks import load_partition

MAKE = ["partition", "digits", "--clients", 4, "--alpha", 0.1, "--out", "p.json"]


def test_file(fl: Any, tmp_path: Path) -> None:
    """The file loads as the partition that was asked for, and the answer counts examples by client and class."""
    facts = json.loads(fl(*MAKE, "--seed", 3, "--json").stdout)
    partition = load_partition(tmp_path / "p.json", facts["num_examples"])
    assert (partition.spec.clients, partition.spec.alpha, partition.spec.seed) == (4, 0.1, 3)
    assert [len(part) for part in partition.parts] == facts["examples"] == [sum(row) for row in facts["classes"]]


def test_same_seed(fl: Any, tmp_path: Path) -> None:
    """The same seed writes the same bytes, another seed others."""
    contents = []
    for seed in (1, 1, 2):
        assert fl(*MAKE, "--seed", seed, "--force").exit_code == 0
        contents.append((tmp_path / "p.json").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_table(fl: Any) -> None:
    """People see how many examples of each class each client holds."""
    lines = fl(*MAKE).stdout.splitlines()
    assert lines[0].split() == ["Client", "Examples", *map(str, range(10))]
    assert len(lines) == 1 + 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digit", "--clients", 4], "digits"),
        (["digits", "--clients", 100_000], "at least one example for each"),
        (["digits", "--clients", 4, "--alpha", 0], "alpha over 0"),
    ],
)
def test_refusals(fl: Any, tmp_path: Path, arguments: list[Any], words: str) -> None:
    """What cannot be dealt exits with 2, says why and leaves no file."""
    result = fl("partition", *arguments, "--out", "p.json")
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "p.json").exists()


def test_no_overwriting(fl: Any, tmp_path: Path) -> None:
    """A partition that devices may already have is not written over unasked."""
    (tmp_path / "p.json").write_text("precious")
    assert fl(*MAKE).exit_code == 2
    assert (tmp_path / "p.json").read_text() == "precious"
