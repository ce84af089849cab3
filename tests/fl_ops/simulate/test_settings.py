"""The table [simulation]: accepted values, and messages for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_ops.errors import UsageError
from fl_ops.files import read_run
from fl_ops.simulate.settings import parse_simulation, read_simulation
from tests.fl_ops.simulate.conftest import MakeTable

FILE = """
name = "mine"
[task]
name = "digits"
[simulation]
clients = 5
partition = { method = "dirichlet", alpha = 0.1 }
"""


def test_one_file_is_both(tmp_path: Path) -> None:
    """The run of a file with [simulation] is the same for `fl run create`, which ignores that table."""
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    config = read_simulation(path)
    assert (config.run.name, config.simulation.clients, config.simulation.name(3)) == ("mine", 5, "client-003")
    assert read_run(path).name == "mine"


@pytest.mark.parametrize(
    ("simulation", "expected"),
    [
        pytest.param({"client": 5}, "simulation.client: unknown key", id="unknown"),
        pytest.param({"clients": -1}, "simulation.clients: expected greater than or equal to 0", id="fewer"),
        pytest.param({"clients": 0}, 'expected 1 or more clients, got 0: only the method "natural"', id="none"),
        pytest.param({"names": "client"}, "expected a pattern with {index}", id="one-name-for-all"),
        pytest.param({"names": "c-{number}"}, "expected a pattern such as", id="unknown-field"),
        pytest.param({"names": "a b {index}"}, "a client's name: expected 1 to 64 of", id="no-id"),
        pytest.param({"partition": {"alpha": 1.0}}, "simulation.partition.method: expected a value", id="no-method"),
        pytest.param({"partition": {"method": "odd"}}, "expected the partition method", id="unknown-method"),
        pytest.param(
            {"partition": {"method": "iid", "clients": 4}}, "unknown key 'clients'; simulation.partition", id="clients"
        ),
    ],
)
def test_invalid_values(table: MakeTable, simulation: dict[str, Any], expected: str) -> None:
    """The message names the key, what was expected and what was found."""
    with pytest.raises(ValueError, match=expected.replace("{", r"\{").replace("}", r"\}")):
        parse_simulation({**table(), "simulation": simulation})


def test_a_misspelt_table(table: MakeTable, tmp_path: Path) -> None:
    """A misspelt name of the table is reported with the file's name."""
    path = tmp_path / "run.toml"
    path.write_text('[task]\nname = "digits"\n[simulaton]\nclients = 5\n')
    with pytest.raises(UsageError, match=r"run\.toml: unknown key 'simulaton'.*Did you mean 'simulation'\?"):
        read_simulation(path)
