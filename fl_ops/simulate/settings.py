"""A run's TOML file with the table [simulation]: the run, and the clients that the simulation creates for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from algorithms import AlgorithmError
from fl_common.names import check_id
from fl_common.settings import Section, describe_error, validated
from fl_extensions.methods import Code, load_method, load_reducer, load_staleness
from fl_ops.errors import UsageError
from fl_ops.files import read_toml
from fl_ops.simulate.measures.section import MeasureSection
from fl_ops.simulate.system.section import SystemSection
from fl_server.errors import InvalidInput
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.sections import Fingerprint
from fl_server.run_settings.spec import from_spec
from fl_tasks import PartitionSpec, TaskError
from protos.run_file import SIMULATION, parse_run


def _check_name_pattern(pattern: str) -> str:
    try:
        first, second = (pattern.format(index=index) for index in (0, 1))
    except (LookupError, ValueError) as error:
        raise ValueError(f'expected a pattern such as "client-{{index:03d}}", got {pattern!r} ({error})') from None
    if first == second:
        raise ValueError(f'expected a pattern with {{index}}, such as "client-{{index:03d}}", got {pattern!r}')
    check_id("a client's name", first)
    return pattern


def _check_folder_pattern(pattern: str) -> str:
    expected = f'expected a pattern with {{name}} once, such as "data/{{name}}", got {pattern!r}'
    try:
        pattern.format(name="a")
    except (LookupError, ValueError) as error:
        raise ValueError(f"{expected} ({error})") from None
    if pattern.count("{name}") != 1:
        raise ValueError(expected)
    return pattern


class SimulationSection(Section):
    """The simulated clients and their data."""

    clients: int = Field(default=100, ge=0)
    """0: one for each group of the task, which is the default with the partition method "natural"."""
    names: Annotated[str, AfterValidator(_check_name_pattern)] = "client-{index:03d}"
    """Pattern of the client ids. index: 0 to clients - 1; it is also the client's part of the partition."""
    partition: dict[str, str | bool | int | float] = Field(default={"method": "iid"})
    """Fields of fl_tasks.PartitionSpec except `clients`. Without `seed`, the run's seed is used, so each seed of a run
    has another partition."""
    folders: Annotated[str, AfterValidator(_check_folder_pattern)] | None = None
    """Pattern of the folders of the clients' own files, in place of a partition: "data/{name}", where {name} is the
    client's id. Without `clients` every folder that is there is a client, in the order of their names."""
    validation_every: int = Field(default=0, ge=0)
    """Withhold one in so many training examples of each class from all clients. Evaluations then use these examples
    instead of the task's held-out data, for example to choose settings. 0: withhold none."""

    task_options: dict[str, Any] = Field(default={})
    """Options of the task on this machine, such as folders of data: a run's file for a coordinator cannot give them.
    They replace those of [task]."""

    digests: bool | None = None
    """Whether the digest of each round's model is among the results, as in a coordinator's ledger. None: on a CPU. On a
    GPU the model comes to the host for it. The digest of the last model is always among the results."""

    measure: MeasureSection | None = None
    """What is measured beyond the evaluations of [evaluation]. None: nothing."""

    system: SystemSection | None = None
    """The clients' devices, for simulated time. None: no time is simulated."""

    @model_validator(mode="before")
    @classmethod
    def _one_for_each_folder_or_group(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        partition, folders = values.get("partition"), values.get("folders") is not None
        if folders and (wrong := [key for key in ("partition", "validation_every") if values.get(key)]):
            raise ValueError(f"{wrong[0]} selects from one training set, and with folders there is none: remove one")
        natural = isinstance(partition, dict) and partition.get("method") == "natural"
        return {"clients": 0, **values} if folders or natural else values

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The settings without those that are absent: an unused setting changes no file of results."""
        values: dict[str, Any] = write(self)
        return {name: value for name, value in values.items() if name != "task_options" or value if value is not None}

    def partition_spec(self, seed: int) -> PartitionSpec:
        """The partition of the data in a run with this seed. Raises TaskError."""
        known = [field.name for field in fields(PartitionSpec) if field.name != "clients"]
        if unknown := sorted(self.partition.keys() - set(known)):
            raise TaskError(f"unknown key {unknown[0]!r}; simulation.partition accepts: {', '.join(known)}")
        if "method" not in self.partition:
            raise TaskError("simulation.partition.method: expected a value, found none")
        values: dict[str, Any] = {"seed": seed, **self.partition}
        return PartitionSpec(clients=self.clients, **values)

    def name(self, index: int) -> str:
        """The id of a client."""
        return self.names.format(index=index)


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """The content of a run's file: the run, and the table [simulation]."""

    run: RunConfig
    simulation: SimulationSection


def read_simulation(path: Path) -> SimulationConfig:
    """Read a run's file. Raises UsageError, which names the file and the key."""
    content = read_toml(path)
    try:
        return parse_simulation(content)
    except (ValueError, InvalidInput) as error:
        raise UsageError(f"{path}: {error}") from error


def parse_simulation(content: Mapping[str, Any]) -> SimulationConfig:
    """The result of `read_simulation` for a parsed table. Raises ValueError and InvalidInput."""
    run = from_spec(parse_run({key: value for key, value in content.items() if key != SIMULATION}))
    try:
        section = validated(content.get(SIMULATION, {}), SimulationSection)
    except ValidationError as error:
        raise ValueError(f"{SIMULATION}.{describe_error(error.errors()[0], SimulationSection)}") from None
    if section.folders is None:
        section.partition_spec(run.seed)
    task = run.task.model_copy(update={"options": {**run.task.options, **section.task_options}})
    run = run.model_copy(update={"task": task})
    return SimulationConfig(run, section)


def with_code(run: RunConfig) -> RunConfig:
    """Load the code from outside that the run names. Returns the run with the fingerprints of that code.

    Raises AlgorithmError if one cannot be loaded, and if a run of a ledger was made with other code.
    """
    algorithm, round_ = run.algorithm, run.round
    method = _checked(load_method(algorithm.name), algorithm.name, algorithm.fingerprint)
    reducer = _checked(load_reducer(round_.reducer), round_.reducer, round_.reducer_fingerprint)
    staleness = round_.staleness
    if staleness is not None:
        rule = _checked(load_staleness(staleness.kind), staleness.kind, staleness.fingerprint)
        staleness = staleness.model_copy(update={"fingerprint": rule})
    return run.model_copy(
        update={
            "algorithm": algorithm.model_copy(update={"fingerprint": method}),
            "round": round_.model_copy(update={"reducer_fingerprint": reducer, "staleness": staleness}),
        }
    )


def _checked(code: Code | None, name: str, wanted: Fingerprint | None) -> Fingerprint | None:
    here = None if code is None else Fingerprint(version=code.version, source=code.source)
    if wanted not in (None, here):
        raise AlgorithmError(f"{name}: expected the run's code, {wanted}, got {here} here: install the run's code")
    return here
