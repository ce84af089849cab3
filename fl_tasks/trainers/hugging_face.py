"""Rounds of a `transformers.Trainer`: its loop, optimizer, callbacks and precision train the model of the round.

The run's rate, weight decay, clipping, batch size and epochs or steps replace those of the TrainingArguments; its seed
orders the examples. Optimizer and schedule begin anew in each round. Nothing is saved on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import SaveStrategy

from fl_tasks.data.samples import Samples
from fl_tasks.errors import TaskError
from fl_tasks.own_loop import TrainContext, TrainReport
from fl_tasks.trainers.rounds import SEEDS, Script, check_device, epochs_of

_TIMES = ("_runtime", "_per_second")
"""Ends of the names of logged values that are no metrics of the model."""


class _OnStep(TrainerCallback):
    """Calls a function after each step of the optimizer."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The exception that ends a round's work passes through the trainer."""
        del args, state, control, kwargs
        self._on_step()


class HuggingFaceScript(Script):
    """A script that built a Trainer."""

    def __init__(self, trainer: Any) -> None:
        if not isinstance(trainer, Trainer):
            raise TaskError(
                "expected the script's function to return a transformers.Trainer, or (trainer, module, data) of"
                f" Lightning, got {type(trainer).__name__}"
            )
        if trainer.optimizer is not None or trainer.lr_scheduler is not None:
            raise TaskError(
                "expected a Trainer that makes its optimizer and schedule itself, in each round anew, got one with"
                " `optimizers`: name them in the TrainingArguments, or use optimizer_cls_and_kwargs"
            )
        self._trainer: Any = trainer
        train: Any = trainer.get_train_dataloader()
        self.train_samples = Samples(train.dataset, train.collate_fn)
        held_out: Any = None if trainer.eval_dataset is None else trainer.get_eval_dataloader()
        self.held_out = None if held_out is None else Samples(held_out.dataset, held_out.collate_fn)
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)  # a daemon has a log of its own

    def take_model(self) -> nn.Module:
        """The trainer's model."""
        trainer = self._trainer
        model: nn.Module = trainer.model
        trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
        return model

    def fit(self, model: nn.Module, dataset: Any, context: TrainContext) -> TrainReport:
        """One round. Raises TaskError if the trainer uses another device than the client."""
        trainer, args = self._trainer, self._trainer.args
        check_device(context.device, args.device)
        args.learning_rate, args.weight_decay = context.learning_rate, context.weight_decay
        args.max_grad_norm = context.max_gradient_norm
        args.per_device_train_batch_size = context.batch_size
        trainer._train_batch_size = args.train_batch_size  # noqa: SLF001 - read from the arguments at the start only
        args.max_steps, args.num_train_epochs = (-1, context.epochs) if context.epochs else (context.steps, 1)
        args.save_strategy, args.load_best_model_at_end = SaveStrategy.NO, False
        args.seed = context.seed % SEEDS
        trainer.train_dataset = dataset
        with self._holding(model, context.on_step):
            set_seed(args.seed)
            done = trainer.train()
        logged = [(it.get("epoch", 0.0), _metrics(it)) for it in trainer.state.log_history if "train_runtime" not in it]
        return TrainReport(done.global_step, len(dataset), epochs_of(logged, done.training_loss))

    @contextmanager
    def _holding(self, model: nn.Module, on_step: Callable[[], None]) -> Iterator[None]:
        """The trainer with the model of the round, which it leaves as it was but for its values."""
        trainer, callback = self._trainer, _OnStep(on_step)
        trainer.model = trainer.model_wrapped = model
        trainer.model_init = None  # it would replace the model
        trainer.accelerator.dataloader_config.data_seed = None  # the order follows the seed of the round
        trainer.add_callback(callback)
        try:
            yield
        finally:
            trainer.remove_callback(callback)
            trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            trainer.accelerator.free_memory()
            trainer.optimizer = trainer.lr_scheduler = None
            self.take_model()


def _metrics(logged: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in logged.items() if name not in {"epoch", "step"} and not name.endswith(_TIMES)
    }
