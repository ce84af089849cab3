"""A run's TOML file with the table [simulation]: the run itself, and the clients that a simulation gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from fl_ops.errors import Misused
from fl_ops.run_file import SIMULATION, parse_run, read_toml
from fl_server.errors import InvalidInput
from fl_server.run_config import RunConfig, from_spec
from protos.settings import Section, in_words
from protos.wire import check_id
from tasks import PartitionSpec, TaskError


def _names(pattern: str) -> str:
    try:
        first, second = (pattern.format(index=index) for index in (0, 1))
    except (LookupError, ValueError) as error:
        raise ValueError(f'expected a pattern such as "client-{{index:03d}}", got {pattern!r} ({error})') from None
    if first == second:
        raise ValueError(f'expected a pattern with {{index}}, such as "client-{{index:03d}}", got {pattern!r}')
    check_id("a client's name", first)
    return pattern


class SimulationSection(Section):
    """Who the clients are and what they hold."""

    clients: int = Field(default=100, ge=1)
    names: Annotated[str, AfterValidator(_names)] = "client-{index:03d}"
    """Ids of the clients; index: 0 to clients - 1, which is also their part of the partition."""
    partition: dict[str, str | bool | int | float] = Field(default={"method": "iid"})
    """Fields of tasks.PartitionSpec but clients. Without a seed, the run's: each seed of a run deals anew."""
    validation_every: int = Field(default=0, ge=0)
    """One in so many training examples of each class is held by no client, and is what evaluations look at in place of
    the task's held-out data: to choose settings by. 0: none."""

    def partition_spec(self, seed: int) -> PartitionSpec:
        """How the data are dealt in a run of this seed. Raises TaskError."""
        known = [field.name for field in fields(PartitionSpec) if field.name != "clients"]
        if unknown := sorted(self.partition.keys() - set(known)):
            raise TaskError(f"unknown key {unknown[0]!r}; simulation.partition accepts: {', '.join(known)}")
        if "method" not in self.partition:
            raise TaskError("simulation.partition.method: expected a value, found none")
        values: dict[str, Any] = {"seed": seed, **self.partition}
        return PartitionSpec(clients=self.clients, **values)

    def name(self, index: int) -> str:
        """A client's id."""
        return self.names.format(index=index)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a file describes."""

    config: RunConfig
    simulation: SimulationSection


def read_plan(path: Path) -> Plan:
    """The run and the clients of a file. Raises Misused, which names file and key."""
    content = read_toml(path)
    try:
        return parse_plan(content)
    except (ValueError, InvalidInput) as error:
        raise Misused(f"{path}: {error}") from error


def parse_plan(content: Mapping[str, Any]) -> Plan:
    """As `read_plan`, of a table. Raises ValueError and InvalidInput."""
    run = {key: value for key, value in content.items() if key != SIMULATION}
    config = from_spec(parse_run(run))
    try:
        section = SimulationSection.model_validate(content.get(SIMULATION, {}))
    except ValidationError as error:
        raise ValueError(f"{SIMULATION}.{in_words(error.errors()[0], SimulationSection)}") from None
    section.partition_spec(config.seed)
    return Plan(config, section)
