"""Rounds of a LightningModule: its trainer's loop, optimizers, callbacks and precision train the model of the round.

The run's rate, weight decay, clipping, batch size and epochs or steps replace those of the script; its seed orders the
examples. Loop, optimizers and schedules begin anew in each round; callbacks stay. Nothing is saved on the device.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from fl_tasks.data.samples import Samples
from fl_tasks.errors import TaskError
from fl_tasks.own_loop import TrainContext, TrainReport
from fl_tasks.trainers.rounds import SEEDS, Script, check_device, epochs_of

_RATES = ("lr", "learning_rate")
"""Where Lightning's own search for a rate looks for it."""
_DATA = "a LightningDataModule, or a data loader of training examples and, if there is one, of held-out examples"


class LightningScript(Script):
    """A script that built a trainer, a module and its data."""

    def __init__(self, made: tuple[Any, ...]) -> None:
        self._pl = _library_of(made)
        if not (
            2 < len(made) <= 4
            and isinstance(made[0], self._pl.Trainer)
            and isinstance(made[1], self._pl.LightningModule)
        ):
            raise TaskError(
                f"expected the script's function to return (trainer, module, data) of Lightning, data being {_DATA},"
                f" got ({', '.join(type(it).__name__ for it in made)})"
            )
        self._trainer, self._model = made[:2]
        _rate_of(self._model)
        train, held_out = self._loaders(made[2:])
        self._shuffled = _shuffled(train)
        self.train_samples = Samples(train.dataset, train.collate_fn)
        self._held_out = held_out
        self.held_out = None if held_out is None else Samples(held_out.dataset, held_out.collate_fn)
        callbacks = self._pl.callbacks
        unused = callbacks.Checkpoint, callbacks.ProgressBar, callbacks.ModelSummary
        self._trainer.callbacks = [it for it in self._trainer.callbacks if not isinstance(it, unused)]

    def take_model(self) -> nn.Module:
        """The script's module."""
        gc.collect()  # save_hyperparameters() leaves a cycle that holds the module
        model: nn.Module = self._model
        self._model = None
        return model

    def fit(self, model: nn.Module, dataset: Any, context: TrainContext) -> TrainReport:
        """One round. Raises TaskError if the trainer uses another device than the client."""
        trainer = self._trainer
        check_device(context.device, trainer.strategy.root_device)
        _set(model, _rate_of(model), context.learning_rate)
        _set_weight_decay(model, context.weight_decay)
        trainer.gradient_clip_val = context.max_gradient_norm or None
        # Another loop: the one of the round before has reached its end.
        trainer.fit_loop = type(trainer.fit_loop)(trainer, max_epochs=context.epochs or -1)
        trainer.fit_loop.epoch_loop.max_steps = -1 if context.epochs else context.steps
        samples = self.train_samples
        loader = DataLoader(dataset, context.batch_size, self._shuffled, collate_fn=samples.collate)
        watch = _watch(self._pl, context.on_step)
        trainer.callbacks.append(watch)
        self._pl.seed_everything(context.seed % SEEDS)
        try:
            trainer.fit(model, loader, self._held_out)
        finally:
            trainer.callbacks.remove(watch)
            model.to(context.device)  # the strategy leaves it on the CPU
            model.trainer = None  # type: ignore[assignment] # a LightningModule's
        return TrainReport(watch.steps, len(dataset), epochs_of(watch.logged, None))

    def _loaders(self, data: tuple[Any, ...]) -> tuple[Any, Any]:
        """The data loaders of training and of evaluation; None without one."""
        if len(data) == 1 and isinstance(data[0], self._pl.LightningDataModule):
            module = data[0]
            module.prepare_data()
            module.setup("fit")
            has_held_out = type(module).val_dataloader is not self._pl.LightningDataModule.val_dataloader
            data = (module.train_dataloader(), module.val_dataloader() if has_held_out else None)
        train, held_out = (*data, None)[:2]
        if not isinstance(train, DataLoader) or not isinstance(held_out, DataLoader | None):
            raise TaskError(f"expected {_DATA}, got ({', '.join(type(it).__name__ for it in data)})")
        return train, held_out


def _library_of(made: tuple[Any, ...]) -> ModuleType:
    """`lightning.pytorch` or `pytorch_lightning`: two libraries with classes of their own. Raises TaskError."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        library = sys.modules.get(name)
        if library is not None and made and isinstance(made[0], library.Trainer):
            return library
    raise TaskError(
        f"expected a Trainer of Lightning as the first of what the script's function returned, got"
        f" {type(made[0]).__name__ if made else 'an empty tuple'}"
    )


def _watch(library: ModuleType, on_step: Callable[[], None]) -> Any:
    """A callback that counts the steps of the optimizer and keeps what was logged in each epoch."""

    class Watch(library.Callback):  # type: ignore[misc, name-defined] # a class of the script's own library
        def __init__(self) -> None:
            self.steps = 0
            self.logged: list[tuple[float, Mapping[str, Any]]] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
            del module, batch
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, torch.Tensor):
                self.logged.append((trainer.current_epoch + 1, {"loss": loss.item()}))
            if trainer.global_step > self.steps:
                self.steps = trainer.global_step
                on_step()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            del module
            values = {name: value.item() for name, value in trainer.callback_metrics.items() if name != "loss"}
            self.logged.append((trainer.current_epoch + 1, values))

    return Watch()


def _shuffled(loader: DataLoader[Any]) -> bool:
    """Whether a loader shuffles. Raises TaskError for another order, which a part of the examples cannot have."""
    if isinstance(loader.sampler, RandomSampler):
        return True
    if isinstance(loader.sampler, SequentialSampler):
        return False
    raise TaskError(
        "expected a data loader of training examples that shuffles or not, got one with a"
        f" {type(loader.sampler).__name__}: a round reads the examples of its shard in an order of its own"
    )


def _rate_of(module: Any) -> str:
    """The name of the module's learning rate. Raises TaskError if it has none."""
    for name in _RATES:
        if hasattr(module, name) or name in module.hparams:
            return name
    raise TaskError(
        f"expected {type(module).__name__} to have its learning rate as the attribute or hyperparameter `lr` or"
        " `learning_rate`, which the run sets, got neither: use it in configure_optimizers()"
    )


def _set_weight_decay(module: Any, value: float) -> None:
    name = "weight_decay"
    if hasattr(module, name) or name in module.hparams:
        _set(module, name, value)
    elif value:
        raise TaskError(
            f"expected {type(module).__name__} to have the attribute or hyperparameter `{name}` for the run's"
            f" local.{name} = {value}, got none: use it in configure_optimizers(), or leave it out of the run's file"
        )


def _set(module: Any, name: str, value: float) -> None:
    if hasattr(module, name):
        setattr(module, name, value)
    if name in module.hparams:
        module.hparams[name] = value
