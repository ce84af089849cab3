"""`fl-client policy show` and `check`: the site's rules, and what they decide about a run's file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict

from fl_client.errors import StartError, UsageError
from fl_client.policy.budget import FILE, NAMES, DailyUsage
from fl_client.policy.config import Policy
from fl_client.policy.rules import OrderedWork, Request, ShardSize, Verdict, day_verdicts, verdicts, work_of
from fl_client.settings.config import ClientConfig
from fl_client.setup.settings_file import ConfigFile, read, toml
from fl_client.setup.units import CONFIG
from fl_client.storage.state import shard_file
from fl_common.command_help import Group, examples
from fl_common.settings import parse_toml
from protos.fl.v1 import admin_pb2, training_pb2
from protos.run_file import SIMULATION, parse_run

if TYPE_CHECKING:
    from algorithms import Algorithm

REFUSED = 1
DEFAULT_ALGORITHM, DEFAULT_BATCH_SIZE, DEFAULT_EPOCHS = "fedcm", 32, 1
"""What a coordinator adds to a run's file without these values."""

app = typer.Typer(cls=Group, no_args_is_help=True, help="The site's policy: its rules, and what they decide of a run.")


@app.command(**examples("fl-client policy show --config client.toml"))
def show(config: ConfigFile = Path(CONFIG)) -> None:
    """Print the rules of the policy file, and how much of the day's budget is used."""
    settings, policy = read(config)
    if settings.policy is None:
        print(f"no policy: {config} does not name one, so this device accepts every run of its task")
        return
    print(f"# {settings.policy}")
    for table, rules in policy.model_dump(mode="json", exclude_defaults=True).items():
        if isinstance(rules, dict):
            print(f"[{table}]\n" + "\n".join(f"{key} = {toml(value)}" for key, value in rules.items()))
        else:
            print(f"{table} = {toml(rules)}")
    for line in _used_today(settings, policy):
        print(line)


@app.command(**examples("fl-client policy check run.toml --examples 1200"))
def check(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run's file, as `fl run create` takes it.")],
    config: ConfigFile = Path(CONFIG),
    local_examples: Annotated[
        int | None,
        typer.Option("--examples", min=1, metavar="N", help="Examples of this device, in place of its shard's."),
    ] = None,
) -> None:
    """Say rule by rule whether this device accepts a run. Exit code 0: it does; 1: it refuses it; 2: no valid file."""
    settings, policy = read(config)
    spec = _run_of(run)
    decisions = list(_verdicts(settings, policy, spec, local_examples or _shard_size(settings, spec.task.name)))
    for verdict in decisions:
        print(f"{_MARKS[verdict.accepted]:<7} {verdict.rule}: {verdict.text}")
    refused = [verdict.rule for verdict in decisions if verdict.accepted is False]
    if refused:
        print(f"{run}: refused by {', '.join(dict.fromkeys(refused))}")
        raise typer.Exit(REFUSED)
    open_ = sum(verdict.accepted is None for verdict in decisions)
    print(f"{run}: accepted" + (f"; {open_} not decided by a run's file" if open_ else ""))


_MARKS = {True: "accept", False: "REFUSE", None: "open"}


def _verdicts(
    settings: ClientConfig, policy: Policy, spec: admin_pb2.RunSpec, local_examples: int | None
) -> Iterator[Verdict]:
    """All decisions on a run, its evaluations by clients included."""
    name, here = spec.task.name, [served.name for served in settings.served]
    text = f"the run's task is {name!r}, and this device has {' and '.join(repr(it) for it in dict.fromkeys(here))}"
    yield Verdict("tasks", name in here, text)
    work = _work(spec, local_examples)
    optimizer = spec.local.optimizer.name or "sgd"
    request = Request(
        "training",
        name,
        algorithm=spec.algorithm.name or DEFAULT_ALGORITHM,
        optimizer=optimizer,
        work=work,
        min_clients=spec.round.min_accepted if spec.round.HasField("min_accepted") else None,
        privacy=spec.privacy.unit if spec.HasField("privacy") else None,
        secure=spec.HasField("secure_aggregation"),
    )
    yield from verdicts(policy, request)
    yield from day_verdicts(policy, work)
    if spec.evaluation.clients_every:
        for verdict in verdicts(policy, Request("evaluation", name)):
            if verdict.rule == "share":
                yield verdict


def _work(spec: admin_pb2.RunSpec, local_examples: int | None) -> OrderedWork:
    """The work of the assignment that trains, as far as it is known."""
    local = spec.local
    batch_size = local.batch_size if local.HasField("batch_size") else DEFAULT_BATCH_SIZE
    amount = {"steps": local.steps} if local.HasField("steps") else {"epochs": local.epochs or DEFAULT_EPOCHS}
    algorithm = _algorithm(spec.algorithm)
    if algorithm is not None and algorithm.skipping:
        return OrderedWork(None, None, None, batch_size)
    passes = algorithm is not None and algorithm.exchanges[-1].passes
    if local_examples is not None:
        return work_of(
            ShardSize(local_examples),
            max(1, batch_size),
            epochs=amount.get("epochs"),
            steps=amount.get("steps"),
            passes=passes,
        )
    epochs, steps = amount.get("epochs"), amount.get("steps")
    known = None if epochs is None else Fraction(epochs + passes)
    return OrderedWork(None if passes else steps, known, None, batch_size, local_steps=steps)


def _algorithm(spec: training_pb2.AlgorithmSpec) -> Algorithm | None:
    """The method; None if it is from outside, which is not loaded."""
    import algorithms  # loads torch, which other commands do not need

    try:
        parameters = MessageToDict(spec.parameters)
        return algorithms.build(spec.name or DEFAULT_ALGORITHM, **parameters)
    except (ValueError, TypeError, LookupError):
        return None


def _run_of(path: Path) -> admin_pb2.RunSpec:
    try:
        content = parse_toml(path.read_bytes())
        spec = parse_run({key: value for key, value in content.items() if key != SIMULATION})
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}: expected a run's configuration in TOML") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
    if not spec.task.name:
        raise UsageError(f"{path}: expected a table [task] with a name, got none")
    return spec


def _shard_size(settings: ClientConfig, task: str) -> int | None:
    """Examples of the shard that an earlier start has made. None if there is none or several, or all data is used."""
    titles = [served.title if settings.tasks else "" for served in settings.served if served.name == task]
    try:
        (title,) = titles
        kept: Any = json.loads((settings.state_dir / shard_file(title)).read_bytes())
        return len(kept["indices"]) or None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _used_today(settings: ClientConfig, policy: Policy) -> Iterator[str]:
    try:
        usage = DailyUsage(settings.state_dir / FILE, time.time)
    except StartError as error:
        raise UsageError(str(error)) from None
    usage.set_zone(policy.hours.timezone)
    usage.roll()
    for name in NAMES:
        if (limit := getattr(policy.day, f"max_{name}")) is not None:
            yield f"# today: {name} {getattr(usage.used, name):g} of {limit:g}"
