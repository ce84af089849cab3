"""A run's TOML table as RunSpec, and the errors of invalid tables."""

from __future__ import annotations

import re
import tomllib

import pytest
from google.protobuf.json_format import MessageToDict

from protos.run_file import parse_run

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


def test_schedules() -> None:
    """A table for each parameter; lists of rounds are lists."""
    spec = parse_run(tomllib.loads(
        """[algorithm.schedules]
        rho = { kind = "step", milestones = [3, 5], factor = 0.5 }
        [algorithm.schedules.eta_g]
        kind = "cosine"
        end = 1
        """
    ))  # fmt: skip
    schedules = spec.algorithm.schedules
    assert (schedules["eta_g"].kind, schedules["eta_g"].end) == ("cosine", 1.0)
    assert (list(schedules["rho"].milestones), schedules["rho"].factor) == ([3, 5], 0.5)
    assert not schedules["rho"].HasField("end")


def test_largest_seed() -> None:
    """A seed keeps all of its 64 bits."""
    assert parse_run({"seed": 2**64 - 1}).seed == 2**64 - 1


@pytest.mark.parametrize(
    ("text", "expected"),
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
        ("algorithm.schedules = 5", ["algorithm.schedules: expected a table [algorithm.schedules], got the number 5"]),
        ("[algorithm.schedules]\nrho = 5", ["algorithm.schedules.rho: expected a table [algorithm.schedules.rho]"]),
        (
            "[algorithm.schedules.rho]\nkid = 'step'",
            ["'algorithm.schedules.rho.kid'; [algorithm.schedules.rho] accepts: kind, end", "Did you mean 'kind'?"],
        ),
        ("algorithm.schedules.rho.milestones = 5", ["rho.milestones: expected a list, got the number 5"]),
        ("algorithm.schedules.rho.milestones = [5, 1.5]", ["rho.milestones.1: expected a whole number"]),
        ("algorithm.schedules.rho.end = '1'", ["rho.end: expected a finite number, got text '1'"]),
        ("[task]\noptions = 5", ["task.options: expected a table [task.options], got the number 5"]),
    ],
)
def test_wrong_files(text: str, expected: list[str]) -> None:
    """A wrong key or value is named by its path, with what was expected, what came and the likely cure."""
    with pytest.raises(ValueError, match=re.escape(expected[0])) as caught:
        parse_run(tomllib.loads(text))
    assert all(word in str(caught.value) for word in expected), str(caught.value)


@pytest.mark.parametrize("table", ["task.options", "algorithm.parameters", "round.reducer_parameters"])
def test_a_whole_number_that_the_wire_would_round_is_refused(table: str) -> None:
    """In every table of any shape, also deep in it; the largest exact one passes."""
    *section, name = table.split(".")
    text = f"[{section[0]}]\n{name} = {{ deep = [{{ count = %d }}] }}"
    for exact in (2**53 - 1, 1 - 2**53):
        assert parse_run(tomllib.loads(text % exact))
    for rounded in (2**53 + 1, -(2**53), 10**400):
        with pytest.raises(
            ValueError, match=rf"{re.escape(table)}.deep.0.count: expected a whole number from -9007199"
        ):
            parse_run(tomllib.loads(text % rounded))
