"""The table [simulation]: what it accepts, and what is said of what it does not."""

from __future__ import annotations

import pytest

from fl_ops.errors import Misused
from fl_ops.run_file import read_run
from fl_ops.simulate.settings import parse_plan, read_plan

FILE = """
name = "mine"
[task]
name = "digits"
[simulation]
clients = 5
partition = { method = "dirichlet", alpha = 0.1 }
"""


def test_one_file_is_both(tmp_path):
    """The run of a file with [simulation] is the same for `fl run create`, which does not look at that table."""
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    plan = read_plan(path)
    assert (plan.config.name, plan.simulation.clients, plan.simulation.name(3)) == ("mine", 5, "client-003")
    assert read_run(path).name == "mine"


@pytest.mark.parametrize(
    ("simulation", "words"),
    [
        pytest.param({"client": 5}, "simulation.client: unknown key", id="unknown"),
        pytest.param({"clients": 0}, "simulation.clients: expected greater than or equal to 1", id="none"),
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
def test_what_cannot_be(table, simulation, words):
    """The key is named, what was expected, and what came."""
    with pytest.raises(ValueError, match=words.replace("{", r"\{").replace("}", r"\}")):
        parse_plan({**table(), "simulation": simulation})


def test_a_misspelt_table(table, tmp_path):
    """A near miss of the table's name is told, by the file's name."""
    path = tmp_path / "run.toml"
    path.write_text('[task]\nname = "digits"\n[simulaton]\nclients = 5\n')
    with pytest.raises(Misused, match=r"run\.toml: unknown key 'simulaton'.*Did you mean 'simulation'\?"):
        read_plan(path)
