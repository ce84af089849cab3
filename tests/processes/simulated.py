"""The run of a coordinator with three daemons once more: simulated in this process, and replayed from its ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from typer.testing import CliRunner, Result

from fl_ops.commands.cli import app
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.settings import SimulationConfig, SimulationSection
from fl_ops.simulate.simulation import Simulation
from fl_server.run_settings.spec import from_spec
from tests.processes.federation import TASK, Coordinator, run_spec
from tests.processes.process import write_toml

CLIENTS: dict[str, Any] = {"clients": 3, "names": "edge-{index}", "partition": {"method": "iid", "seed": 1}}
"""The clients of a `Fleet`."""


@contextmanager
def simulation(
    name: str, *, secret: bytes = b"", clients: int = 3, partition: int = 1, **sections: Any
) -> Iterator[Simulation]:
    """The run before its first round.

    Args:
        name: of the run.
        secret: of a private run.
        clients: their number.
        partition: its seed.
        sections: as for `Coordinator.create`.
    """
    section = SimulationSection(**{**CLIENTS, "clients": clients, "partition": {"method": "iid", "seed": partition}})
    config = SimulationConfig(from_spec(run_spec(name, **sections)), section)
    prepared = prepare(config, config.run.seed)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task, secret=secret) as made:
        yield made


def simulated_rounds(name: str, **sections: Any) -> list[RoundResult]:
    """All rounds of the run."""
    with simulation(name, **sections) as made:
        return list(made.rounds())


def simulated_digests(name: str, **sections: Any) -> list[str]:
    """The digest of the model after each round."""
    return [done.digest or "" for done in simulated_rounds(name, **sections)]


def replay(
    server: Coordinator,
    run: str,
    *options: str,
    task: Mapping[str, Any] | None = None,
    seed: int = 1,
    clients: int = 3,
) -> Result:
    """`fl simulate --replay` of a run.

    Args:
        server: with the run.
        run: its name.
        options: of the command.
        task: another task than the run's usual one, or with options.
        seed: of the partition.
        clients: their number.
    """
    config = server.folder / f"replay-{run}.toml"
    section = {**CLIENTS, "clients": clients, "partition": {"method": "iid", "seed": seed}}
    write_toml(config, {"task": {"name": TASK, **(task or {})}, "simulation": section})
    state = str(server.settings["state_dir"])
    return CliRunner().invoke(app, ["simulate", str(config), "--replay", run, "--state-dir", state, *options])


def check_replay(server: Coordinator, run: str, task: Mapping[str, Any] | None = None, clients: int = 3) -> None:
    """A replay computes the models of the ledger."""
    result = replay(server, run, task=task, clients=clients)
    assert result.exit_code == 0, result.output
    assert "every model equals the ledger's bit for bit" in result.output
