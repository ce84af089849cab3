"""The data of private steps: a digest of every example, and batches in which nothing of another example is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from algorithms.batches import Apart, forward_pair
from algorithms.privacy.per_example import ClippedGradients, Clipping
from fl_client.errors import WorkFailed
from fl_client.training.private_data import private_data
from fl_tasks import Batched, Examples, Samples
from fl_tasks.batches import poisson_batches

INPUTS, TARGETS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
DRAWS = [torch.tensor([1, 4, 7]), torch.tensor([], dtype=torch.int64), torch.tensor([0])]


def samples(rows: Sequence[Any] | None = None, **options: Any) -> Samples:
    """Pairs (inputs, target)."""
    return Samples([*zip(INPUTS, TARGETS, strict=True)] if rows is None else rows, **options)


def padded(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sequences, as long as the longest of them."""
    return pad_sequence([one for one, _ in rows], batch_first=True), torch.stack([target for _, target in rows])


class Mean(nn.Module):
    """Scores of the mean of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """[examples, length, 4] -> [examples, 3]."""
        scores: Tensor = self.linear(inputs).mean(1)
        return scores


def clipped(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The sum of clipped gradients."""
    return ClippedGradients(model, functional.cross_entropy, forward_pair, Clipping(0.5)).sum(batch)


def test_samples_have_the_gradients_of_examples_in_memory() -> None:
    """Examples of equal shapes are one batch; a draw without an example adds nothing."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    of_examples = poisson_batches(Examples(INPUTS, TARGETS), DRAWS)
    for mine, other in zip(poisson_batches(samples(), DRAWS), of_examples, strict=True):
        assert isinstance(mine, Apart)
        assert len(mine.parts) <= 1
        found, expected = clipped(model, mine), clipped(model, other)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nothing_of_another_example_is_in_a_sample() -> None:
    """Sequences are collated alone, so none is padded to the length of another one."""
    torch.manual_seed(1)
    model = Mean()
    rows = [(torch.randn(length, 4), target) for length, target in zip((3, 5, 3, 2), TARGETS, strict=False)]
    data = samples(rows, collate=padded)
    [batch] = poisson_batches(data, [torch.arange(4)])
    assert isinstance(batch, Apart)
    assert [len(part[0]) for part in batch.parts] == [2, 1, 1]
    alone = [clipped(model, next(poisson_batches(data, [torch.tensor([one])]))) for one in range(4)]
    for name, tensor in clipped(model, batch).items():
        torch.testing.assert_close(tensor, sum(one[name] for one in alone))


def test_augmentations_differ_by_step_and_not_by_the_batch() -> None:
    """An example is augmented by seed, step and position, whoever is drawn with it."""

    class Noisy:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
            return INPUTS[index] + torch.rand(4), TARGETS[index]

    def first(draws: list[list[int]], seed: int = 3) -> list[Tensor]:
        batches = poisson_batches(Samples(Noisy()), [torch.tensor(draw) for draw in draws], seed)
        return [batch.parts[0][0][0] for batch in batches if isinstance(batch, Apart)]

    both, alone = first([[5, 6], [5]]), first([[5], [5]])
    assert torch.equal(both[0], alone[0])
    assert torch.equal(both[1], alone[1])
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(both[0], first([[5]], seed=4)[0])


CHANGES: dict[str, Callable[[], Samples | Examples]] = {
    "another value": lambda: samples([*zip(INPUTS + torch.eye(12, 4), TARGETS, strict=True)]),
    "one example less": lambda: samples([*zip(INPUTS[:-1], TARGETS[:-1], strict=True)]),
    "another order": lambda: samples([*zip(INPUTS.flip(0), TARGETS.flip(0), strict=True)]),
    "another structure": lambda: samples([{"x": x, "y": y} for x, y in zip(INPUTS, TARGETS, strict=True)]),
    "another name": lambda: samples([{"x": x, "z": y} for x, y in zip(INPUTS, TARGETS, strict=True)]),
    "a text": lambda: samples([(x, y, "a") for x, y in zip(INPUTS, TARGETS, strict=True)]),
    "another text": lambda: samples([(x, y, "b") for x, y in zip(INPUTS, TARGETS, strict=True)]),
}


def test_the_digest_is_of_every_example() -> None:
    """Equal data has an equal digest; data that differs in anything has another."""
    found = [private_data(samples()), *(private_data(make()) for make in CHANGES.values())]
    assert len({one.digest for one in found}) == 1 + len(CHANGES)
    assert private_data(samples()) == found[0]
    changed = TARGETS.clone()
    changed[3] = 0
    assert private_data(Examples(INPUTS, TARGETS)) != private_data(Examples(INPUTS, changed + 1))


REFUSED: dict[str, tuple[Samples | Batched, str]] = {
    "batches": (Batched(lambda _: [(INPUTS, TARGETS)], 1, 12), "got Batched, whose batches the task makes"),
    "pieces": (
        samples(collate=lambda rows: (torch.cat([rows[0][0][None]] * 3), torch.zeros(3, dtype=torch.int64))),
        "expected a batch of one example from one record, got 3",
    ),
    "objects": (samples(collate=lambda rows: (rows[0][0][None], object())), "texts and numbers, got object in one"),
    "texts alone": (samples(["a", "b"]), "expected a batch of tensors"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_data_that_cannot_be_drawn_one_by_one_is_refused_with_the_reason(kind: str) -> None:
    """The message has no value of the data."""
    data, message = REFUSED[kind]
    with pytest.raises(WorkFailed, match=message):
        private_data(data)
