"""A task made of the function of a training script that builds its trainer.

    from fl_tasks.trainers import trainer_task

    def build(data: Path = Path("reviews.csv")) -> Trainer:
        ...
        return Trainer(model, TrainingArguments("out"), train_dataset=train, eval_dataset=held_out)

    Reviews = trainer_task(build)

    if __name__ == "__main__":
        build().train()

The script trains alone as before, and its attribute `Reviews` is a task. docs/training/trainers.md says which settings
of a run replace those of the script.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset

from fl_tasks.data.samples import Samples
from fl_tasks.data.shard import Shard
from fl_tasks.errors import TaskError
from fl_tasks.own_loop import TrainContext, TrainReport
from fl_tasks.trainers.rounds import Script

FOLDER = "folder"
"""The parameter of a script's function that gets the folder of a device's shard."""

Metrics = Callable[[Any, Any], Mapping[str, Tensor]]
"""(output, batch) -> values by name, one for each example of the batch."""


class ScriptTask:
    """A task whose model, data and training loop are those of a script. `trainer_task` makes its subclasses."""

    build: ClassVar[Callable[..., Any]]
    per_example: ClassVar[Metrics | None]
    version: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._scripts: dict[Path | None, Script] = {}
        """Those built so far, by the folder of their data."""

    def model(self) -> nn.Module:
        """A new model, from a new call of the script's function."""
        script = self._built(None)
        self._scripts.setdefault(None, script)
        return script.take_model()

    def train_data(self, shard: Shard) -> Samples:
        """The training examples that the script's trainer would read, of this shard."""
        return _of_shard(self._script(shard).train_samples, shard)

    def eval_data(self, shard: Shard | None = None) -> Samples | None:
        """The examples on which the script's trainer evaluates: on a device those of its own folder."""
        return self._script(Shard() if shard is None else shard).held_out

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The loss that a model of Hugging Face returns with its output, otherwise the mean of the metric `loss`."""
        own = getattr(output, "loss", None)
        return own if own is not None else self.metrics(output, batch)["loss"].mean()

    def metrics(self, output: Any, batch: Any) -> Mapping[str, Tensor]:
        """Those that `trainer_task` got, otherwise cross entropy and accuracy of a classifier."""
        if self.per_example is not None:
            return type(self).per_example(output, batch)  # type: ignore[misc] # not None
        return classification(output, batch)

    def train(self, model: nn.Module, data: Samples, context: TrainContext) -> TrainReport:
        """One round by the script's own trainer."""
        if context.processes > 1:
            raise TaskError(
                "expected one process for a trainer of Hugging Face or Lightning, got"
                f" {context.processes}: leave out the setting `processes`"
            )
        base = _base(data.dataset)
        script = next(it for it in self._scripts.values() if _base(it.train_samples.dataset) is base)
        return script.fit(model, data.dataset, context)

    def _script(self, shard: Shard) -> Script:
        """What the script's function built for this shard's folder; the function is called once for each."""
        if shard.folder is not None and FOLDER not in inspect.signature(self.build).parameters:
            raise TaskError(
                f"expected {self.build.__name__}() to have a parameter `{FOLDER}` for the shard {shard.folder}: add"
                " one, and read the examples from it"
            )
        if shard.folder not in self._scripts:
            self._scripts[shard.folder] = self._built(shard.folder)
            self._scripts[shard.folder].take_model()
        return self._scripts[shard.folder]

    def _built(self, folder: Path | None) -> Script:
        made = type(self).build(**self._options | ({} if folder is None else {FOLDER: folder}))
        if isinstance(made, tuple):
            from fl_tasks.trainers.lightning import LightningScript  # noqa: PLC0415 - the library may be missing

            return LightningScript(made)
        from fl_tasks.trainers.hugging_face import HuggingFaceScript  # noqa: PLC0415 - the library may be missing

        return HuggingFaceScript(made)


def trainer_task(
    build: Callable[..., Any], *, metrics: Metrics | None = None, version: str = "1", own_options: Sequence[str] = ()
) -> type[ScriptTask]:
    """The class of a task whose model, data and training loop are those of a training script.

    build: a function of the script. It returns a `transformers.Trainer`, or (trainer, module, data) of Lightning as
        `Trainer.fit` takes them: a LightningDataModule, or a data loader and one for evaluation. Its parameters are the
        task's options; those that are annotated as a Path are settings of each machine. A parameter `folder` gets the
        folder of a device's shard.
    metrics: (output, batch) -> values by name, one for each example. None: cross entropy and accuracy of a classifier.
    version: raise it when devices with older code must not train.
    own_options: names of more options that only the settings of each machine may give.
    """
    return type(
        build.__name__,
        (ScriptTask,),
        {
            "__doc__": f"The task of the function {build.__name__}.",
            "__module__": build.__module__,
            "__signature__": inspect.signature(build),
            "build": staticmethod(build),
            "per_example": None if metrics is None else staticmethod(metrics),
            "version": version,
            "own_options": tuple(own_options),
        },
    )


def classification(output: Any, batch: Any) -> dict[str, Tensor]:
    """Cross entropy and 1 for a correct class or 0, each [batch], of scores [batch, classes] and class numbers [batch].

    output: the scores, or an object with them as `logits`. batch: a mapping with `labels`, or the class numbers.
    Raises TaskError for other shapes.
    """
    scores = getattr(output, "logits", output)
    labels = batch.get("labels") if isinstance(batch, Mapping) else batch
    if not (
        isinstance(scores, Tensor)
        and isinstance(labels, Tensor)
        and scores.shape[:-1] == labels.shape
        and labels.dim() == 1
        and not labels.is_floating_point()
    ):
        raise TaskError(
            "expected scores [batch, classes] and class numbers [batch], got"
            f" {_shape(scores)} and {_shape(labels)}: give trainer_task(build, metrics=...) a function"
            " (output, batch) -> {name: [batch]}"
        )
    loss = functional.cross_entropy(scores, labels, reduction="none")
    return {"loss": loss, "accuracy": (scores.argmax(dim=1) == labels).to(loss.dtype)}


def _of_shard(samples: Samples, shard: Shard) -> Samples:
    return Shard(indices=shard.indices).of(samples)


def _base(dataset: Any) -> Any:
    """The data set below all selections of its examples."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _shape(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
