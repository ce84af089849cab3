"""The values of a model along random directions that have the norms of its own filters (Li et al., 2018).

    L(w + a d + b e)    d, e: `algorithms.sharpness.filter_normalised` of two seeds, the same draws for every model

The loss and the metrics are means over a sample of the clients' training examples, in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from algorithms.model_state import tied_names
from algorithms.sharpness import MeanLoss, filter_normalised, moved
from fl_common.units import counted
from fl_ops.errors import NotFound, UsageError
from fl_ops.simulate.clients import PreparedRun
from fl_ops.simulate.measures.section import SharpnessSection
from fl_ops.simulate.measures.sharpness import SampledLoss
from fl_ops.simulate.output.results import MODEL
from fl_ops.simulate.seeds import SAVED
from fl_tasks import Task, TaskError
from fl_tasks.base import task_code
from fl_tasks.evaluation import finished, sums_of_batches, totals_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Grid:
    """Where a model is evaluated: `points` values from -radius to radius, along one direction or two."""

    points: int
    radius: float
    two: bool = False

    @property
    def axis(self) -> list[float]:
        """The values of one axis; 0 in the middle is exact."""
        half = self.points // 2
        return [self.radius * (number - half) / half for number in range(self.points)]

    @property
    def places(self) -> list[tuple[float, ...]]:
        """(a,) or (a, b) of each point."""
        return list(product(self.axis, repeat=2 if self.two else 1))


@dataclass(frozen=True)
class Point:
    """A place, the task's loss there, and its metrics."""

    at: tuple[float, ...]
    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Landscape:
    """One model. sharpness: its measures, as [simulation.measure] names them."""

    label: str
    points: list[Point]
    sharpness: dict[str, float]

    @property
    def here(self) -> Point:
        """The model itself."""
        return next(point for point in self.points if not any(point.at))


class Sample:
    """The task of a run, and the examples of its clients on which models are compared."""

    def __init__(self, run: PreparedRun, section: SharpnessSection) -> None:
        """Raises TaskError for data that cannot be sampled."""
        self._task: Task = run.clients.task
        self._name, self._section = run.config.task.name, section
        self._loss = SampledLoss(section, self._task, run.clients, CPU)

    def loss_of(self, path: Path) -> MeanLoss:
        """The loss of a saved model. Raises UsageError, NotFound and TaskError."""
        return self._loss.of(lambda model: fill(model, read_model(path), self._name, path))

    def landscape(self, label: str, loss: MeanLoss, grid: Grid, on_point: Callable[[], None]) -> Landscape:
        """The values of a model; on_point is called after each. Raises TaskError."""
        section, model = self._section, loss.model
        directions = [filter_normalised(model, section.seed + number) for number in range(1 + grid.two)]
        points: list[Point] = []
        for place in grid.places:
            with moved(model, list(zip(place, directions, strict=True))):
                points.append(self._point(place, loss))
            on_point()
        with task_code("the task's model or loss, differentiated twice"):
            return Landscape(label, points, section.measure(loss))

    def _point(self, place: tuple[float, ...], loss: MeanLoss) -> Point:
        with task_code("the task's loss"):
            value = loss.value()
        return Point(place, value, self._metrics(loss.model))

    def _metrics(self, model: nn.Module) -> dict[str, float]:
        batches = self._loss.batches
        measured = totals_of(sums_of_batches(self._task, model, batches), self._loss.examples)
        try:
            return {name: value for name, value in finished(self._task, measured).items() if name != "loss"}
        except TaskError:  # far away a metric may have no value
            return {name: value for name, value in measured.means.items() if name != "loss"}


def labels_of(paths: Sequence[Path]) -> list[str]:
    """A short name of each model: the last parts of its path in which they differ."""
    parts = [path.with_suffix("").parts if path.suffix == ".safetensors" else path.parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number + 1})" for number, name in enumerate(names)]


def read_model(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of a run's folder, or of the run that a folder has.

    A folder is that of a seed of `fl simulate --out`, one above with one seed, or the save of a run that has not ended,
    as `cells/unfinished` of a comparison has them. Raises NotFound, and UsageError for another file.
    """
    if not path.exists():
        raise NotFound(f"there is no {path}: expected a model as safetensors, or the folder of a simulated run")
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():  # reading a pipe would block, and a device never ends
        raise UsageError(f"{path}: expected a safetensors file or a folder")
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"{path}: expected a model as safetensors, got another file ({error})") from error


def _of_folder(path: Path) -> dict[str, Tensor]:
    seeds = sorted(folder for folder in path.glob("seed-*") if folder.is_dir())
    if len(seeds) > 1:
        names = ", ".join(folder.name for folder in seeds[:_SHOWN])
        raise UsageError(
            f"{path} has the runs of {counted(len(seeds), 'seed')} ({names}): name the folder of one or more of them"
        )
    folder = seeds[0] if seeds else path
    saves = [save for place in (folder / SAVED, folder) for save in sorted(place.glob(f"run-*/round-*/{MODEL}"))]
    for file in (folder / MODEL, *reversed(saves)):
        if file.exists():
            return read_model(file)
    raise NotFound(
        f"{path} has no model: expected {MODEL} of `fl simulate --out`, or the save of a run. `fl compare` keeps the"
        " models of unfinished cells only; simulate the run with `fl simulate --out`"
    )


_SHOWN = 4


def fill(model: nn.Module, values: Mapping[str, Tensor], task: str, path: Path) -> None:
    """Load the values into a task's model. Raises UsageError if they are of another one, or not finite."""
    own = model.state_dict()
    tied = {name: of for name, of in tied_names(model).items() if name not in values}
    whole = {**values, **{name: values[of] for name, of in tied.items() if of in values}}
    if difference := _difference(own, whole):
        raise UsageError(f"{path} is not a model of the task {task}: {difference}")
    for name, tensor in whole.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"{path}: expected finite values, got others in {name!r}: the run has diverged")
    model.load_state_dict(whole)


def _difference(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """The first difference of the layout; empty if there is none."""
    if missing := [name for name in own if name not in given]:
        return f"expected the tensor {missing[0]!r} {_form(own[missing[0]])}, got none of this name"
    if more := [name for name in given if name not in own]:
        return f"got the tensor {more[0]!r} {_form(given[more[0]])}, which the task's model does not have"
    for name, tensor in own.items():
        if tensor.shape != given[name].shape or tensor.dtype != given[name].dtype:
            return f"expected the tensor {name!r} as {_form(tensor)}, got {_form(given[name])}"
    return ""


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
