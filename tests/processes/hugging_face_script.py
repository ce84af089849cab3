"""A training script with a Trainer of Hugging Face, as people write it: a small classifier of sequences."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from fl_tasks.trainers import trainer_task


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers under 50; the class is whether the first half has large ones."""

    def __init__(self, size: int, seed: int) -> None:
        self._ids = torch.randint(0, 50, (size, 8), generator=torch.Generator().manual_seed(seed))
        self._labels = (self._ids[:, :4].float().mean(dim=1) > 24.5).long()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._labels[index]}


def accuracy(predicted: Any) -> dict[str, float]:
    """The share of correct classes."""
    return {"accuracy": float((predicted.predictions.argmax(axis=1) == predicted.label_ids).mean())}


def build(start: Path | None = None, seed: int = 1, size: int = 60) -> Trainer:
    """The trainer. start: a folder with the first model; None: random values."""
    size_of: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = BertConfig(vocab_size=50, max_position_embeddings=8, **size_of)
    model = BertForSequenceClassification(config)
    if start is not None:
        model = BertForSequenceClassification.from_pretrained(start)
    arguments = TrainingArguments(
        "build/hugging-face",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        seed=seed,
        use_cpu=True,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="no",
    )
    train, held_out = Sequences(size, 1), Sequences(40, 2)
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=held_out, compute_metrics=accuracy)
    return trainer  # noqa: RET504 - the script's line above stays as it was


Federated = trainer_task(build)


def main(start: Path | None = None, seed: int = 1, size: int = 60) -> Trainer:
    """Train and evaluate."""
    trainer = build(start, seed, size)
    trainer.train()
    print(trainer.evaluate())  # noqa: T201 - a script's result
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    main(seed=parser.parse_args().seed)
