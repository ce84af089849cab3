"""The task's model with the values of an exported file, and its frozen parameters from the task."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from algorithms.model_state import state_views, tied_names
from fl_ops.errors import Refused, UsageError
from fl_ops.exports.header import frozen_digest
from fl_tasks import Task, TaskError, TaskNotListed, load_task, own_options
from fl_tasks.building.new_model import new_model
from protos.frozen import frozen_resource, frozen_text


def task_of(name: str, options: dict[str, object], *, trusted: bool) -> Task:
    """The task with this name. trusted: the name is from a file of this machine's user, not from the coordinator.

    Raises UsageError: a name of the coordinator is never imported unless it is built in or installed, and no path of
    the coordinator is one of this machine.
    """
    try:
        if not trusted and (foreign := own_options(name, ()) & options.keys()):
            raise UsageError(
                f"the coordinator names files of this machine, {min(foreign)} = {options[min(foreign)]!r}, for task"
                f" {name!r}: add --config with a run's file whose [task] options has it"
            )
        return load_task(name, options, None if trusted else ())
    except TaskNotListed as error:
        raise UsageError(
            f"the model of the run's task {name!r} is needed here, and its code is imported only on your own word: add"
            " --config with a run's file whose [task] names it"
        ) from error
    except TaskError as error:
        raise UsageError(f"task {name}: {error}") from error


def load_exported(task: Task, file: Path) -> nn.Module:
    """The model of the task with the values of an exported file.

    Raises Refused: the task's model is another one, or its frozen parameters are not those of the run.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            module = new_model(task)
        values = load_file(file)
    except (TaskError, SafetensorError, OSError) as error:
        raise Refused(str(error)) from error
    frozen = state_views(module).frozen
    absent: set[str] = set()
    if expected := frozen_digest(file):
        if (here := frozen_text(frozen_resource(frozen))) != expected:
            raise Refused(
                f"expected the frozen parameters of the run, {expected}, got {here or 'none'} from the task's model()"
                " here: put the files here that the coordinator's task loads"
            )
        absent = {*frozen, *(name for name, of in tied_names(module).items() if of in frozen)}
    try:
        missing, unexpected = module.load_state_dict(values, strict=False)
    except RuntimeError as error:
        raise Refused(f"the exported model does not fit the task's model: {error}") from error
    if wrong := [*(name for name in missing if name not in absent), *unexpected]:
        raise Refused(
            f"the exported model does not fit the task's model: {wrong[0]!r} is "
            f"{'not expected' if wrong[0] in unexpected else 'missing'}; use the options of the run"
        )
    return module


def trained_names(module: nn.Module) -> set[str]:
    """Names in the state_dict of what a run changes: trainable parameters and buffers, under all names of tied ones."""
    views = state_views(module)
    changed = {*views.trainable, *views.buffers}
    return {*changed, *(name for name, of in tied_names(module).items() if of in changed)}
