"""From a run's TOML file to RunSpec, and what is said about files that are none."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from fl_ops.errors import Misused
from fl_ops.run_file import parse_run, read_run
from protos.fl.v1 import admin_pb2

WHOLE = """
name = "digits-fedcm"
seed = 7
population = 8
initial_model = "start.safetensors"
keep_checkpoints = 2
labels = { site = "north" }
[task]
name = "digits"
options = { hidden = 32, layers = ["a", "b"], deep = true }
[algorithm]
name = "fedcm"
parameters = { alpha = 0.2 }
[local]
learning_rate = 0.2
epochs = 5
batch_size = 16
[round]
clients_per_round = 2
min_clients = 8
close = "cohort"
[stop]
rounds = 40
target = 1
[evaluation]
every = 1
"""


def test_whole_file() -> None:
    """Every value of a file is in the spec under the same path, and what is absent stays unset."""
    spec = parse_run(tomllib.loads(WHOLE))
    assert (spec.name, spec.seed, spec.population, spec.labels["site"]) == ("digits-fedcm", 7, 8, "north")
    assert spec.algorithm.parameters["alpha"] == 0.2
    assert MessageToDict(spec.task.options) == {"hidden": 32.0, "layers": ["a", "b"], "deep": True}
    assert (spec.local.epochs, spec.round.close, spec.stop.rounds, spec.stop.target) == (5, "cohort", 40, 1.0)
    assert not spec.local.HasField("steps")


def test_largest_seed() -> None:
    """A seed keeps all of its 64 bits."""
    assert parse_run({"seed": 2**64 - 1}).seed == 2**64 - 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sede = 1", ["'sede'", "the top level accepts: name, task", "Did you mean 'seed'?"]),
        ("[round]\nclient_per_round = 2", ["round.client_per_round", "[round] accepts:", "'clients_per_round'?"]),
        ("clientsPerRound = 2", ["'clientsPerRound'"]),
        ("epochs = 5", ["'epochs' belongs to [local]"]),
        ("[local]\nseed = 5", ["'seed' belongs to the top level"]),
        ("[zzz]\nx = 1", ["unknown key 'zzz'"]),
        ('[local]\nepochs = "five"', ["local.epochs: expected a whole number from 0 to 4294967295, got text 'five'"]),
        ("[local]\nepochs = 5.0", ["local.epochs", "got the number 5.0"]),
        ("[local]\nepochs = true", ["local.epochs", "got true"]),
        ("[local]\nlearning_rate = nan", ["local.learning_rate: expected a finite number, got the number nan"]),
        ("seed = -1", ["seed: expected a whole number", "got the number -1"]),
        ("seed = 1979-05-27", ["got the date or time 1979-05-27"]),
        ('task = "digits"', ["task: expected a table [task], got text 'digits'"]),
        ("[[task]]\nname = 'a'", ["task: expected a table [task], got a list"]),
        ("name = 3", ["name: expected text, got the number 3"]),
        ("[labels]\nsite = 3", ["labels.site: expected text"]),
        ("[algorithm.parameters]\nalpha = inf", ["algorithm.parameters.alpha: expected text, true"]),
        ("[task.options]\nx = [1, 1979-05-27]", ["task.options.x.1"]),
        ("[task]\noptions = 5", ["task.options: expected a table [task.options], got the number 5"]),
    ],
)
def test_wrong_files(text: str, words: list[str]) -> None:
    """A wrong key or value is named by its path, with what was expected, what came and the likely cure."""
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        parse_run(tomllib.loads(text))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    """A path without a file is named."""
    with pytest.raises(Misused, match=r"there is no file .*run\.toml"):
        read_run(tmp_path / "run.toml")


def test_not_toml(tmp_path: Path) -> None:
    """A file that is no TOML is refused with its place."""
    (tmp_path / "run.toml").write_text("x = 1\nname = what")
    with pytest.raises(Misused, match=r"run\.toml cannot be read as TOML: .*line 2"):
        read_run(tmp_path / "run.toml")


def test_create_sends_the_file(admin: Any, fl: Any, tmp_path: Path) -> None:
    """`fl run create` sends what the file says, and --name wins over the file's."""
    (tmp_path / "run.toml").write_text(WHOLE)
    admin.answers["CreateRun"] = admin_pb2.CreateRunResponse(run=admin_pb2.RunStatus(run_id="other"))
    assert fl("run", "create", "run.toml", "--name", "other").exit_code == 0
    expected = parse_run({**tomllib.loads(WHOLE), "name": "other"})
    assert admin.requests == [admin_pb2.CreateRunRequest(spec=expected)]


def test_create_refuses_before_calling(admin: Any, fl: Any, tmp_path: Path) -> None:
    """A wrong file exits with 2 and reaches no coordinator."""
    (tmp_path / "run.toml").write_text("sede = 1")
    assert fl("run", "create", "run.toml").exit_code == 2
    assert admin.requests == []
