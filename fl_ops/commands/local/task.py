"""`fl task check`: builds a task's model, trains one step, evaluates, and shows what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fl_common.command_help import Group, examples
from fl_common.units import counted, size
from fl_ops.commands import completion
from fl_ops.commands.options import Context, command
from fl_ops.errors import Refused, UsageError
from fl_ops.render import output

if TYPE_CHECKING:
    from fl_tasks import Task
    from fl_tasks.data.forms import Data

app = typer.Typer(cls=Group, no_args_is_help=True, help="Check tasks before a run uses them.")

Finding = dict[str, str]
"""check, result ("ok", "remark" or "FAIL") and text."""


@app.command(**examples("fl task check my_task:Wine", "fl task check my_task:Wine --option hidden=32"))
@command
def check(
    context: Context,
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK", help="A built-in task's name, or module:attribute.", autocompletion=completion.task_names
        ),
    ],
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the task; the value as in TOML.")
    ] = None,
) -> None:
    """Build the task's model, train one step, evaluate, and show what is wrong.

    It makes the checks of a coordinator that creates a run and of a device that trains, on this machine's data.
    """
    findings = list(_findings(task, _options(option or [])))
    table = "\n".join(f"{finding['result']:6} {finding['check']}: {finding['text']}" for finding in findings)
    output.show({"task": task, "findings": findings}, table, context.as_json)
    if failed := [finding for finding in findings if finding["result"] == "FAIL"]:
        raise Refused(f"task {task}: {failed[0]['check']} failed")


def _options(given: list[str]) -> dict[str, object]:
    """Options by name. A value that is not TOML is text. Raises UsageError for one without a name."""
    import tomllib

    options: dict[str, object] = {}
    for option in given:
        name, equals, text = option.partition("=")
        if not name or not equals:
            raise UsageError(f"--option: expected KEY=VALUE, got {option!r}")
        try:
            options[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            options[name] = text
    return options


def _findings(name: str, options: dict[str, object]) -> Iterator[Finding]:
    """What each check finds, up to the first one that fails."""
    # Imported here because it loads torch, which takes seconds and which most other commands do not need.
    from fl_tasks import fingerprint, load_task

    made: dict[str, Any] = {}

    def load() -> str:
        made["task"] = load_task(name, options)
        version, source = fingerprint(made["task"])
        return f"version {version!r}, {source}"

    checks: list[tuple[str, Callable[[], str]]] = [
        ("task", load),
        ("model", lambda: _model(made["task"])),
        ("data", lambda: _data(made)),
        ("step", lambda: _step(made)),
        ("evaluation", lambda: _evaluation(made)),
    ]
    for what, run in checks:
        try:
            yield {"check": what, "result": "ok", "text": run()}
        except Exception as error:  # noqa: BLE001 - the task is the user's code, which may raise anything
            yield {"check": what, "result": "FAIL", "text": _text(error)}
            return
        if what == "model":
            yield from _remarks(made["task"])


def _text(error: Exception) -> str:
    from fl_tasks import TaskError

    return str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"


def _model(task: Task) -> str:
    """The checks of a coordinator that creates a run."""
    from fl_server.aggregation.task_model import TaskModel

    model = TaskModel(task, seed=0)
    with model.first() as values:
        frozen = sum(tensor.nbytes for tensor in values.frozen.values())
    trained, sent = model.trainable_layout.size_bytes, model.layout.size_bytes
    return f"{size(trained)} trained, {size(sent - trained)} in buffers, {size(frozen)} frozen"


def _remarks(task: Task) -> Iterator[Finding]:
    from fl_tasks.new_model import new_model, remarks_on

    yield from ({"check": "model", "result": "remark", "text": text} for text in remarks_on(new_model(task)))


def _data(made: dict[str, Any]) -> str:
    import torch

    from fl_client.training.data import local_data
    from fl_tasks import Shard, TaskError
    from fl_tasks.data.forms import as_data
    from fl_tasks.data.labels import numbered
    from fl_tasks.errors import task_call

    task, cpu = made["task"], torch.device("cpu")
    made["train"], own = local_data(task, Shard(), cpu)
    with task_call("the task's eval_data()"):
        held_out = as_data(task.eval_data())
    made["held_out"] = numbered(task, held_out, "the held-out data of the coordinator")
    if not len(made["train"]):
        raise TaskError("expected at least one training example in train_data(Shard()), got none")
    train = counted(len(made["train"]), "example")
    return f"{train} to train on, {len(held_out)} for the coordinator, {len(own)} for a device"


def _step(made: dict[str, Any]) -> str:
    import torch

    from fl_client.training.local_model import trial_step
    from fl_tasks import TaskError
    from fl_tasks.new_model import new_model

    torch.manual_seed(0)
    made["model"] = new_model(made["task"])
    trial = trial_step(made["task"], made["train"], made["model"], torch.device("cpu"))
    if not math.isfinite(trial.loss):
        raise TaskError(f"expected a finite loss of the first batch, got {trial.loss}: check the data")
    return f"{trial.examples} examples, loss {trial.loss:.4f}, {1000 * trial.seconds:.0f} ms"


def _evaluation(made: dict[str, Any]) -> str:
    from fl_tasks.evaluation import evaluate

    data: Data = made["held_out"] if len(made["held_out"]) else made["train"]
    return ", ".join(f"{name} {value:.4f}" for name, value in evaluate(made["task"], made["model"], data).items())
