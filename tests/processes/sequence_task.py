"""A task whose batches are dicts with an attention mask: a small transformer predicts the next token of a sequence.

No example has a class. Sequences have unequal lengths, and noise on the tokens comes from three generators.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

from fl_tasks import Batched, Samples, Shard

TRAIN, HELD_OUT, TOKENS, LONGEST, SIZE = 90, 20, 12, 9, 8

Batch = Mapping[str, Tensor]


class Sequences(Dataset[Tensor]):
    """Sequences that count upwards by one or two, with a wrong token here and there."""

    def __init__(self, start: int, count: int, noise: float = 0.2) -> None:
        self._start, self._count, self._noise = start, count, noise

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        at = self._start + index
        tokens = (at + (1 + at % 2) * torch.arange(4 + at % (LONGEST - 3))) % (TOKENS - 1) + 1
        if torch.rand(()) < self._noise and random.random() < 0.9:
            tokens[np.random.randint(len(tokens))] = int(torch.randint(1, TOKENS, ()))  # noqa: NPY002 - as data sets do
        return tokens


def padded(sequences: list[Tensor]) -> dict[str, Tensor]:
    """tokens [batch, longest], filled up with 0, and mask [batch, longest], True for a token."""
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    return {"tokens": tokens, "mask": tokens > 0}


class Transformer(nn.Module):
    """One layer with causal attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, SIZE), nn.Embedding(LONGEST, SIZE)
        self.layer = nn.TransformerEncoderLayer(SIZE, 2, 16, dropout=0.1, batch_first=True)
        self.last = nn.Linear(SIZE, TOKENS)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """loss [batch], the mean over the tokens of a sequence, and correct [batch], the share of correct tokens."""
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        scores = self.last(self.layer(hidden, src_mask=causal, src_key_padding_mask=~mask))[:, :-1]
        target, counts = tokens[:, 1:], mask[:, 1:].float()
        losses = functional.cross_entropy(scores.transpose(1, 2), target, reduction="none")
        right = (scores.argmax(2) == target).float()
        return {name: (each * counts).sum(1) / counts.sum(1) for name, each in (("loss", losses), ("correct", right))}


class Counting:
    """Predict the next token.

    form: "samples", a data set with a collate function, or "batched", a loader of the task's own. workers: processes
    that read ahead. hold: while this file exists, a training step waits. kept: held-out examples of each shard.
    """

    version = "1"

    def __init__(self, form: str = "samples", workers: int = 0, hold: str = "/nonexistent", kept: int = 0) -> None:
        self._form, self._workers, self._hold, self._kept = form, int(workers), Path(hold), int(kept)

    def model(self) -> nn.Module:
        return Transformer()

    def loss(self, output: Batch, batch: Batch) -> Tensor:
        assert batch.keys() == {"tokens", "mask"}
        while self._hold.exists():
            time.sleep(0.005)
        return output["loss"].mean()

    def train_size(self) -> int:
        return TRAIN

    def train_data(self, shard: Shard) -> Samples | Batched:
        data = shard.of(Sequences(0, TRAIN))
        data = Subset(data, range(self._kept, len(data)))
        if self._form == "samples":
            return Samples(data, padded, workers=self._workers)

        def batches(seed: int) -> Iterable[Batch]:
            generator = torch.Generator().manual_seed(seed)
            return DataLoader(data, 7, shuffle=True, collate_fn=padded, generator=generator)

        return Batched(batches, -(-len(data) // 7), len(data))

    def eval_data(self, shard: Shard | None = None) -> Samples | None:
        if shard is None:
            return Samples(Sequences(TRAIN, HELD_OUT, noise=0.0), padded)
        return Samples(Subset(shard.of(Sequences(0, TRAIN, noise=0.0)), range(self._kept)), padded)

    def metrics(self, output: Batch, batch: Batch) -> dict[str, Tensor]:
        assert len(batch["tokens"]) == len(output["loss"])
        return {"loss": output["loss"], "accuracy": output["correct"]}
