"""The task's model with the values of an exported file, and its frozen parameters from the task."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

from algorithms.model_state import state_views, tied_names
from fl_ops.errors import Refused, UsageError
from fl_ops.exports.download import frozen_digest
from fl_ops.files import Target, make_folder, written_whole
from fl_server.aggregation.task_model import CPU
from fl_server.store.checkpoint_files import separate
from fl_tasks import Task, TaskError, TaskNotListed, load_task, own_options
from fl_tasks.data.forms import as_data
from fl_tasks.errors import task_call, task_code
from fl_tasks.evaluation import batch_size_on, estimate_statistics
from fl_tasks.new_model import new_model
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


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_PREFIX = "base_model.model."
"""What peft puts before the name of each tensor."""
_NAME = "default"
"""The adapter's name in a peft model. Files do not have it."""


def adapter_of(task: Task, module: nn.Module) -> tuple[dict[str, Tensor], str]:
    """The tensors of the model's adapter by peft's names, and its configuration as JSON.

    A model of peft has both. For another one the task gives the configuration by `adapter_config()`, and the adapter is
    its trainable parameters, with those whose name has "lora_" in it. Raises UsageError if there is no adapter.
    """
    # The first part of the module that peft has given adapters.
    wrapped = next((part for part in module.modules() if isinstance(getattr(part, "peft_config", None), dict)), None)
    config = _config_of(task, wrapped)
    tensors = _peft_tensors(wrapped) if wrapped is not None else _own_tensors(module)
    if not tensors:
        raise UsageError("expected a model with an adapter, got one without trainable parameters")
    return tensors, json.dumps(config, indent=2, sort_keys=True, default=_plain) + "\n"


def _config_of(task: Task, wrapped: nn.Module | None) -> dict[str, Any]:
    given = getattr(task, "adapter_config", None)
    if callable(given):
        try:
            with task_code("the task's adapter_config()"):
                config = given()
        except TaskError as error:
            raise UsageError(str(error)) from error
    elif wrapped is not None:
        configs: Any = wrapped.peft_config
        config = configs.get(_NAME)
    else:
        raise UsageError(
            "expected a model of the peft library, or a task with adapter_config(), the content of adapter_config.json"
            f" as a dict; {type(task).__name__} has neither"
        )
    if callable(to_dict := getattr(config, "to_dict", None)):
        config = to_dict()
    if not isinstance(config, Mapping):
        raise UsageError(f"adapter_config(): expected a dict or a configuration of peft, got {type(config).__name__}")
    return {**config, "inference_mode": True}


def _peft_tensors(wrapped: nn.Module) -> dict[str, Tensor]:
    """The tensors as `save_pretrained` of peft writes them. The task has imported peft."""
    from peft.utils import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(wrapped, adapter_name=_NAME, save_embedding_layers=False)
    return {name if name.startswith(_PREFIX) else _PREFIX + name: tensor for name, tensor in tensors.items()}


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): parameter.detach()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad or "lora_" in name
    }


def _plain(value: object) -> object:
    """JSON for what configurations hold: sets, enums and others."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(getattr(value, "value", value))


_FORMAT = {"format": "pt"}


def write_whole(exported: Path, to: Path, task: Task) -> None:
    """Write the exported model with the frozen parameters that it leaves out, so that it loads strictly.

    Raises OpsError.
    """
    _save(dict(load_exported(task, exported).state_dict()), to)


def write_estimated(exported: Path, to: Path, task: Task) -> None:
    """Write the whole model with running statistics that are computed anew from the task's held-out examples.

    Raises Refused: the task's code raises, or has no held-out examples here. OpsError.
    """
    module = load_exported(task, exported)
    try:
        with task_call("the task's eval_data()"):
            data = as_data(task.eval_data())
        if not len(data):
            raise TaskError("expected held-out examples of the task here to estimate statistics from, got none")
        estimate_statistics(task, module, data, batch_size_on(CPU))
    except TaskError as error:
        raise Refused(str(error)) from error
    _save(dict(module.state_dict()), to)


def write_trained(exported: Path, to: Path, task: Task) -> None:
    """Write what the run changes of the exported model: trainable parameters and buffers. Raises OpsError."""
    module = load_exported(task, exported)
    names = trained_names(module)
    _save({name: tensor for name, tensor in module.state_dict().items() if name in names}, to)


def write_adapter(model: Path, target: Target, task: Task) -> Path:
    """Write the adapter of a downloaded model to a folder. Returns the path of its tensors' file. Raises OpsError."""
    tensors, config = adapter_of(task, load_exported(task, model))
    data = save(separate(tensors), metadata=_FORMAT)
    make_folder(target.path)
    for name, content in ((WEIGHTS, data), (CONFIG, config.encode())):
        with written_whole(Target(target.path / name, replace=target.replace)) as file:
            file.write(content)
    return target.path / WEIGHTS


@contextmanager
def rewriting(file: BinaryIO, folder: Path) -> Iterator[Path]:
    """A path in a new folder in `folder`. What is written there becomes the content of the open file."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / "model.safetensors"
        yield made
        file.seek(0)
        file.truncate()
        with made.open("rb") as source:
            shutil.copyfileobj(source, file, 1 << 20)


def _save(tensors: dict[str, Tensor], to: Path) -> None:
    save_file(separate(tensors), to, metadata=_FORMAT)
