"""Rewrites a downloaded model in another format, with the model of its task."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from safetensors.torch import save, save_file
from torch import Tensor

from fl_ops.errors import Refused
from fl_ops.exports.adapter import CONFIG, WEIGHTS, adapter_of
from fl_ops.exports.whole_model import load_exported, trained_names
from fl_ops.files import Target, make_folder, written_whole
from fl_server.aggregation.blocks import CPU
from fl_server.store.bundle_files import separate
from fl_tasks import Task, TaskError
from fl_tasks.data.forms import as_data
from fl_tasks.errors import task_call
from fl_tasks.evaluation import batch_size_on
from fl_tasks.statistics import estimate_statistics

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
    _save({name: each for name, each in module.state_dict().items() if name in names}, to)


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
