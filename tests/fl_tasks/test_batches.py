"""The order of examples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch

from fl_tasks import Examples, TaskError
from fl_tasks.batches import batches, count_steps, ordered_batches, plan_batches, raw_batches, seed_everything
from fl_tasks.built_in.transforms import FlipAndCrop, Normalise
from fl_tasks.data.batched import Batched
from fl_tasks.data.forms import Data
from fl_tasks.data.samples import Samples

TEN = Examples(torch.arange(10.0), torch.arange(10))


def seen(seed: int = 0, examples: Examples = TEN, batch_size: int = 4, **length: Any) -> list[list[int]]:
    """Targets of the batches, as lists."""
    return [targets.tolist() for _, targets in batches(examples, batch_size, seed, **length)]


def test_an_epoch_has_every_example_once() -> None:
    """Ten examples in batches of four are 4, 4 and 2, each example once."""
    epoch = seen(epochs=1)
    assert [len(batch) for batch in epoch] == [4, 4, 2]
    assert list(range(10)) == sorted(chain(*epoch))


def test_each_epoch_has_its_own_order() -> None:
    """The second epoch has another order."""
    two = seen(epochs=2)
    assert two[:3] != two[3:]


def test_the_order_depends_on_the_seed_alone() -> None:
    """Equal seeds give equal batches for any state of torch's default generator; another seed gives others."""
    torch.manual_seed(1)
    first = seen(seed=5, epochs=2)
    torch.manual_seed(2)
    assert first == seen(seed=5, epochs=2)
    assert first != seen(seed=6, epochs=2)


def test_steps_continue_over_epochs() -> None:
    """Seven steps begin like the epochs and continue where the first epochs end."""
    assert seen(epochs=3)[:7] == seen(steps=7)


def test_inputs_stay_with_their_targets() -> None:
    """Shuffling moves both in the same way."""
    for inputs, targets in batches(TEN, 3, 0, epochs=1):
        assert inputs.tolist() == targets.tolist()


def test_augmentation_is_applied_to_inputs_only() -> None:
    """Every batch passes through augment once."""
    doubled = Examples(TEN.inputs, TEN.targets, lambda inputs: inputs * 2)
    for inputs, targets in batches(doubled, 4, 0, epochs=1):
        assert inputs.tolist() == (targets * 2).tolist()


@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 7}], ids=["epochs", "steps"])
def test_count_steps_counts_batches(length: dict[str, Any]) -> None:
    """The count is known before and equals the batches that come."""
    assert len(seen(**length)) == count_steps(10, 4, **length)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 1, "examples": TEN[:0]}, "at least one example"),
        ({"epochs": 1, "batch_size": 0}, "batch size of 1 or more, got 0"),
        ({}, "either epochs or steps, got epochs=None and steps=None"),
        ({"epochs": 1, "steps": 1}, "either epochs or steps"),
        ({"epochs": 0}, "1 or more epochs, got 0"),
        ({"steps": -1}, "1 or more steps, got -1"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    """Settings that cannot be used for training are refused before the first batch."""
    with pytest.raises(TaskError, match=message):
        seen(**settings)


def test_seed_everything_seeds_the_default_generator() -> None:
    """Equal seeds, equal draws."""
    seed_everything(7)
    first = torch.rand(3)
    seed_everything(7)
    assert torch.equal(first, torch.rand(3))


def test_the_whole_set_is_iterated_once_in_order() -> None:
    """Ten examples in batches of four are 0 to 3, 4 to 7 and 8 to 9, as they are: augmentation is for training."""
    doubled = Examples(TEN.inputs, TEN.targets, lambda inputs: inputs * 2)
    got = [(inputs.tolist(), targets.tolist()) for inputs, targets in ordered_batches(doubled, 4)]
    assert got == [([0, 1, 2, 3],) * 2, ([4, 5, 6, 7],) * 2, ([8, 9],) * 2]


def test_the_whole_of_nothing_is_refused() -> None:
    """As for training, a shard without examples is an error."""
    with pytest.raises(TaskError, match="at least one example"):
        ordered_batches(TEN[:0], 4)


def noisy(inputs: torch.Tensor) -> torch.Tensor:
    """A function, whose numbers are not drawn apart."""
    assert inputs.dtype == torch.float32
    return inputs + torch.randn_like(inputs)


@pytest.mark.parametrize("augment", [None, noisy, FlipAndCrop()], ids=["none", "function", "drawn-apart"])
def test_bytes_are_prepared_batch_by_batch(augment: Any) -> None:
    """Batches of bytes are those of the prepared floats, with the same random numbers; also without the last step."""
    normalise = Normalise((0.5, 0.4), (0.2, 0.3))
    kept = Examples(torch.arange(10 * 2 * 36).view(10, 2, 6, 6).byte(), torch.arange(10), augment, normalise)
    floats = Examples(kept.prepared(), kept.targets, augment)
    found = []
    for data in (floats, kept):
        seed_everything(3)
        found.append([*batches(data, 4, 0, epochs=2)])
    seed_everything(3)
    raw, finish = raw_batches(kept, 4, 0, epochs=2)
    found.append([*raw] if finish is None else [finish(batch) for batch in raw])
    for expected, other, last in zip(*found, strict=True):
        torch.testing.assert_close(other, expected, rtol=0, atol=0)
        torch.testing.assert_close(last, expected, rtol=0, atol=0)
    for expected, other in zip(ordered_batches(floats, 3), ordered_batches(kept, 3), strict=True):
        torch.testing.assert_close(other, expected, rtol=0, atol=0)
    assert (finish is None) == (augment is noisy)


@pytest.mark.parametrize("work", [{"epochs": 1}, {"epochs": 3}, {"steps": 7}])
@pytest.mark.parametrize("batch_size", [1, 10, 50, 64])
def test_a_plan_has_the_batches_of_each_client(batch_size: int, work: dict[str, int]) -> None:
    """The same examples in the same order for each seed, also without shuffling; short batches repeat their first."""
    sizes, seeds = [50, 50, 37, 12, 3], [7, 8, 9, 10, 11]
    rows = torch.arange(sum(sizes)).split(sizes)
    clients = [Examples(own, own) for own in rows]
    shuffled = plan_batches([own.numpy() for own in rows], batch_size, seeds, **work)
    whole = plan_batches([own.numpy() for own in rows], batch_size, (), epochs=1)
    for plan, of_clients in (
        (shuffled, [batches(one, batch_size, seed, **work) for one, seed in zip(clients, seeds, strict=True)]),
        (whole, [ordered_batches(one, batch_size) for one in clients]),
    ):
        for client, expected in enumerate(of_clients):
            found = list(expected)
            assert plan.counts[client] == len(found)
            for number, (inputs, _) in enumerate(found):
                planned = plan.rows[number, client]
                assert plan.sizes[number][client] == len(inputs)
                assert torch.equal(planned[: len(inputs)], inputs)
                assert bool((planned[len(inputs) :] == inputs[0]).all())


@pytest.mark.parametrize("start", [0, 2, 3, 8])
def test_batches_are_read_on_from_any_place(start: int) -> None:
    """The batches from a place on are those that an uninterrupted reading has there, for every kind of data."""
    kinds: list[Data] = [TEN, Samples(Numbers()), Batched(in_threes, 3, 10)]
    for data in kinds:
        whole, _ = raw_batches(data, 4, 7, steps=12)
        rest, _ = raw_batches(data, 4, 7, steps=12 - start, start=start)
        for wanted, came in zip(list(whole)[start:], rest, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(wanted, came, strict=True))


class Numbers:
    """Ten numbered examples."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(float(index)), torch.rand(1)


def in_threes(seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Three batches of an epoch, whose order depends on the seed."""
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    return ((part, torch.rand(1)) for part in order.split(3))
