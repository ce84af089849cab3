"""Batches that the task makes itself: seeds, stated lengths, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, count

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_tasks import Batched, TaskError
from fl_tasks.batches import batches, count_steps, ordered_batches


def loader(seed: int) -> Iterator[Tensor]:
    """Three batches of unequal sizes, in an order by the seed."""
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    yield from torch.split(order, [2, 3, 4])


DATA = Batched(loader, 3, 9)


def test_every_epoch_is_made_anew_from_its_own_seed() -> None:
    """Two epochs have every example each, in other orders; the same seed repeats them, the batch size has no effect."""
    made = [batch.tolist() for batch in batches(DATA, 1, 5, epochs=2)]
    assert [len(batch) for batch in made] == [2, 3, 4] * 2
    first, second = (list(chain(*epoch)) for epoch in (made[:3], made[3:]))
    assert first != second
    assert sorted(first) == sorted(second) == [*range(9)]
    assert made == [batch.tolist() for batch in batches(DATA, 8, 5, epochs=2)]
    assert made != [batch.tolist() for batch in batches(DATA, 1, 6, epochs=2)]


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 4}])
def test_steps_are_counted_in_own_batches(length: dict[str, int]) -> None:
    """count_steps knows the stated length and ignores the batch size."""
    assert len(list(batches(DATA, 100, 5, **length))) == count_steps(9, 100, **length, own_batches=DATA.own_batches)


def test_a_full_gradient_uses_one_epoch_of_seed_0() -> None:
    """It does not depend on the round."""
    expected = [batch.tolist() for batch in loader(0)]
    assert [batch.tolist() for batch in ordered_batches(DATA, 2)] == expected


def test_an_endless_iterable_is_cut_at_its_length() -> None:
    """Batches beyond the stated length are not made."""
    taken: list[int] = []

    def endless(seed: int) -> Iterator[Tensor]:
        for number in count():
            taken.append(number)
            yield torch.tensor([number])

    assert len(list(batches(Batched(endless, 4, 4), 1, 5, epochs=2))) == 8
    assert taken == [*range(4)] * 2


def test_generators_are_seeded_for_each_batch_and_kept_otherwise() -> None:
    """Batches drawn from the global generators repeat themselves, whatever was drawn between them."""

    def noise(seed: int) -> Iterator[Tensor]:
        while True:
            drawn = [float(torch.rand(())), random.random(), np.random.random()]  # noqa: NPY002 - as data sets do
            yield torch.tensor(drawn, dtype=torch.float64)

    def drawn(between: int) -> list[list[float]]:
        found = []
        for batch in batches(Batched(noise, 2, 2), 1, 5, epochs=2):
            found.append(batch.tolist())
            torch.rand(between)
        return found

    torch.manual_seed(3)
    expected = float(torch.rand(()))
    torch.manual_seed(3)
    found = drawn(0)
    assert float(torch.rand(())) == expected
    assert found == drawn(4)
    assert len({number for batch in found for number in batch}) == 12


def test_fewer_batches_than_stated_are_an_error() -> None:
    """The message has both numbers."""
    with pytest.raises(TaskError, match=r"expected 5 batches in an epoch, as Batched\(.*, got 3"):
        list(batches(Batched(loader, 5, 9), 1, 5, epochs=1))


def test_errors_of_the_task_are_named() -> None:
    """An exception while the batches are made, and while one of them is."""

    def fails_later(seed: int) -> Iterator[Tensor]:
        yield torch.zeros(1)
        raise OSError("unplugged")

    def fails(seed: int) -> Iterator[Tensor]:
        raise OSError("unplugged")

    with pytest.raises(TaskError, match="making the batches of an epoch raised OSError: unplugged"):
        list(batches(Batched(fails, 2, 2), 1, 5, epochs=1))
    with pytest.raises(TaskError, match="making batch 1 of an epoch raised OSError: unplugged"):
        list(batches(Batched(fails_later, 2, 2), 1, 5, epochs=1))


@pytest.mark.parametrize(("length", "examples"), [(0, 3), (3, 0), (4, 3), (-1, 0)])
def test_length_and_examples_must_agree(length: int, examples: int) -> None:
    """No batch is without an example, and no example without a batch."""
    with pytest.raises(TaskError, match=f"got length = {length} and examples = {examples}"):
        Batched(loader, length, examples)


def test_an_iterable_in_place_of_a_function_is_refused() -> None:
    """It could not be made anew for each epoch."""
    with pytest.raises(TaskError, match="expected a function of a seed.*got list"):
        Batched([torch.zeros(1)], 1, 1)  # type: ignore[arg-type] # the error is tested
