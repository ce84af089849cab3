"""A training script with a LightningModule, as people write it: a small classifier of vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fl_tasks.torchvision_compat  # isort: skip # noqa: F401 - lightning imports torchvision, whose operators may be missing
import lightning


class Classifier(lightning.LightningModule):
    """Two layers with dropout."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers(inputs)
        return scores

    def training_step(self, batch: Any, number: int) -> Tensor:
        inputs, targets = batch
        loss = functional.cross_entropy(self(inputs), targets)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        inputs, targets = batch
        self.log("held_out_accuracy", (self(inputs).argmax(dim=1) == targets).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def vectors(size: int, seed: int) -> TensorDataset:
    """Random vectors; the class is the sign of their sum."""
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def main(size: int = 60, start: Path | None = None, seed: int = 1) -> tuple[Any, ...]:
    """Train, and evaluate after each epoch. start: a file with the first model; None: random values."""
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    module = Classifier()
    if start is not None:
        module.load_state_dict(torch.load(start))
    train, held_out = DataLoader(vectors(size, 1), 8, shuffle=True), DataLoader(vectors(40, 2), 40)
    lightning.seed_everything(seed)
    trainer.fit(module, train, held_out)
    return trainer, module, train, held_out


if __name__ == "__main__":
    print(main()[0].callback_metrics)  # noqa: T201 - a script's result
