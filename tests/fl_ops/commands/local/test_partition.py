"""`fl partition`: the file for the devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_tasks import load_partition
from tests.fl_ops.conftest import Fl
from tests.fl_tasks.built_in.leaf import write_femnist

MAKE = ["partition", "digits", "--clients", 4, "--alpha", 0.1, "--out", "p.json"]


def test_file(fl: Fl, tmp_path: Path) -> None:
    """The file loads as the partition that was asked for, and the answer counts examples by client and class."""
    facts = json.loads(fl(*MAKE, "--seed", 3, "--json").stdout)
    partition = load_partition(tmp_path / "p.json", facts["num_examples"])
    assert (partition.spec.clients, partition.spec.alpha, partition.spec.seed) == (4, 0.1, 3)
    assert [len(part) for part in partition.parts] == facts["examples"] == [sum(row) for row in facts["classes"]]


def test_same_seed(fl: Fl, tmp_path: Path) -> None:
    """The same seed writes the same bytes, another seed others."""
    contents = []
    for seed in (1, 1, 2):
        assert fl(*MAKE, "--seed", seed, "--force").exit_code == 0
        contents.append((tmp_path / "p.json").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_every_option_reaches_the_file(fl: Fl, tmp_path: Path) -> None:
    """Each flag is a field of the spec that the file keeps."""
    asked: list[list[object]] = [
        ["dirichlet-hsu", "--prior-scaled", "--rotate", "--sigma", 0.5],
        ["classes", "--classes", 3],
        ["iid", "--stratified"],
        ["dirichlet-class", "--min-examples", 4],
    ]
    for number, options in enumerate(asked):
        fl("partition", "digits", "--clients", 3, "--out", f"{number}.json", "--method", *options)
    specs = [load_partition(tmp_path / f"{number}.json", 1437).spec for number in range(4)]
    assert (specs[0].prior_scaled, specs[0].rotate, specs[0].sigma) == (True, True, 0.5)
    assert (specs[1].classes, specs[2].stratified, specs[3].min_examples) == (3, True, 4)


def test_natural_has_a_client_for_each_user(fl: Fl, tmp_path: Path) -> None:
    """Without --clients the number follows from the task's files, and the file of the partition states it."""
    root = write_femnist(tmp_path / "leaf")
    arguments = ["partition", "femnist", "--data-root", root, "--out", "p.json", "--method"]
    assert fl(*arguments, "natural").exit_code == 0
    partition = load_partition(tmp_path / "p.json", 18)
    assert (partition.spec.clients, [len(part) for part in partition.parts]) == (3, [6, 3, 9])
    refused = fl(*arguments, "iid", "--force")
    assert (refused.exit_code, "expected 1 or more clients, got 0" in refused.stderr) == (2, True)


def test_table(fl: Fl) -> None:
    """People see how many examples of each class each client holds."""
    lines = fl(*MAKE).stdout.splitlines()
    assert lines[0].split() == ["Client", "Examples", *map(str, range(10))]
    assert len(lines) == 1 + 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["digit", "--clients", 4], "digits"),
        (["subprocess:run", "--clients", 4], "annotated to return one"),
        (["digits", "--clients", 100_000], "at least one example for each"),
        (["digits", "--clients", 4, "--alpha", 0], "alpha over 0"),
        (["digits", "--clients", 4, "--rotate"], '"dirichlet" does not read rotate'),
        (["digits", "--clients", 4, "--method", "natural"], "train_groups"),
    ],
)
def test_refusals(fl: Fl, tmp_path: Path, arguments: list[Any], expected: str) -> None:
    """An impossible partition exits with 2, gives the reason and leaves no file."""
    result = fl("partition", *arguments, "--out", "p.json")
    assert result.exit_code == 2
    assert expected in result.stderr
    assert not (tmp_path / "p.json").exists()


def test_no_overwriting(fl: Fl, tmp_path: Path) -> None:
    """A partition that devices may already have is not replaced without --force."""
    (tmp_path / "p.json").write_text("precious")
    assert fl(*MAKE).exit_code == 2
    assert (tmp_path / "p.json").read_text() == "precious"


def test_a_task_without_classes(fl: Fl) -> None:
    """A random partition shows the number of examples of each client; one by class names the method to add."""
    task = "tests.processes.sequence_task:Counting"
    options = ["partition", task, "--clients", 4, "--out", "q.json", "--force"]
    facts = json.loads(fl(*options, "--method", "iid", "--json").stdout)
    assert (facts["num_examples"], facts["examples"], facts.get("classes")) == (90, [23, 23, 22, 22], None)
    lines = fl(*options, "--method", "iid").stdout.splitlines()
    assert [line.split() for line in (lines[0], lines[1])] == [["Client", "Examples"], ["0", "23"]]
    refused = fl(*options, "--method", "shards")
    assert refused.exit_code != 0
    assert "train_labels()" in refused.output
