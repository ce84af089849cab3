"""Batches of any structure: moved, counted, split, and trained on."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

import algorithms as fl
from algorithms.batches import leaves, map_leaves, split

META = torch.device("meta")
X, MASK = torch.arange(12.0).reshape(6, 2), torch.ones(6, 2, dtype=torch.bool)


@dataclass(frozen=True)
class Record:
    """A batch with named parts."""

    inputs: Tensor
    mask: Tensor
    kind: str = "text"


class Sides(NamedTuple):
    """A batch of two inputs."""

    left: Tensor
    right: Tensor


STRUCTURES: list[Any] = [
    X,
    (X, MASK),
    [X, MASK],
    {"inputs": X, "mask": MASK},
    Record(X, MASK),
    Sides(X, MASK),
    UserDict(inputs=X, mask=MASK),
    ({"a": [X], "names": list("abcdef")}, None),
    {"b": Record(X, MASK), "causal": torch.ones(2, 2)},
]
IDS = ["tensor", "tuple", "list", "dict", "dataclass", "named tuple", "mapping", "nested", "shared mask"]


def tensors(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("batch", STRUCTURES, ids=IDS)
def test_a_batch_moves_with_its_structure(batch: Any) -> None:
    """Every tensor is on the device, the types are the same, and the original has not moved."""
    moved = fl.to_device(batch, META)
    assert {tensor.device for tensor in tensors(moved)} == {META}
    assert type(moved) is type(batch)
    assert len(list(leaves(moved))) == len(list(leaves(batch)))
    assert {tensor.device.type for tensor in tensors(batch)} == {"cpu"}


@pytest.mark.parametrize("batch", STRUCTURES, ids=IDS)
def test_parts_of_a_batch_join_to_the_whole(batch: Any) -> None:
    """Six examples in parts of four: the second part has two, and together they are the batch."""
    first, second = split(batch, 4)
    assert (fl.examples_of(batch), fl.examples_of(first), fl.examples_of(second)) == (6, 4, 2)
    assert type(first) is type(batch)
    for whole, left, right in zip(tensors(batch), tensors(first), tensors(second), strict=True):
        joined = torch.cat([left, right]) if len(whole) == 6 else left
        assert torch.equal(joined, whole)


def test_lists_of_strings_are_split_with_their_examples() -> None:
    """A list with one string for each example follows them; another value is in every part."""
    parts = split({"x": X, "names": list("abcdef"), "language": "en"}, 3)
    assert [part["names"] for part in parts] == [["a", "b", "c"], ["d", "e", "f"]]
    assert [part["language"] for part in parts] == ["en", "en"]


def test_a_packed_sequence_moves_and_is_not_split() -> None:
    """Its parts make no sense alone: it moves as one, and a split is refused."""
    packed = rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    assert fl.to_device((packed, X), META)[0].data.device == META
    with pytest.raises(ValueError, match="got PackedSequence"):
        split((packed, X), 4)


def test_a_batch_without_tensors_is_refused() -> None:
    """There is nothing to count the examples by."""
    with pytest.raises(ValueError, match="without such a tensor"):
        fl.examples_of({"names": ["a"], "rate": torch.tensor(1.0)})


def test_a_part_has_at_least_one_example() -> None:
    """A size of 0 is refused."""
    with pytest.raises(ValueError, match="1 or more examples, got 0"):
        split(X, 0)


def forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's output of a dict batch; the loss gets the whole batch."""
    return model(batch["inputs"]), batch


def masked(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean square error of the examples in the mask."""
    return ((output - batch["targets"]).square() * batch["mask"]).mean()


def model_and_batches(count: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A linear model with dropout, and dict batches with a mask."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    return model, [
        {"inputs": torch.randn(5, 4), "targets": torch.randn(5, 2), "mask": (torch.rand(5, 1) > 0.3).float()}
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", [name for name in fl.names() if name != "fedrobust"])
def test_every_method_trains_on_dict_batches_as_on_pairs(name: str) -> None:
    """The mask lies in a third column of the targets of the pair; all payloads have the same bits."""

    def pair_loss(output: Tensor, target: Tensor) -> Tensor:
        return masked(output, {"targets": target[:, :2], "mask": target[:, 2:]})

    algorithm = fl.build(name)
    payloads = []
    for as_dict in (True, False):
        model, batches = model_and_batches(3)
        x = fl.read_state(model).trainable
        if as_dict:
            data = fl.LocalData(batches, batches, masked, forward)
        else:
            pairs = [(batch["inputs"], torch.cat([batch["targets"], batch["mask"]], 1)) for batch in batches]
            data = fl.LocalData(pairs, iter(pairs), pair_loss)
        context = fl.ClientContext(map_leaves(torch.ones_like, x), algorithm.client_init(x))
        work = fl.Work(algorithm, context, fl.LocalSettings(0.1, 0.01, 1.0), len(algorithm.exchanges) - 1)
        torch.manual_seed(5)
        payloads.append(fl.answer(model, data, work).payloads)
    (as_dicts, as_pairs) = payloads
    assert as_dicts.keys() == as_pairs.keys() != set()
    assert all(torch.equal(as_dicts[p][name], as_pairs[p][name]) for p in as_dicts for name in as_dicts[p])


def test_a_method_that_transforms_inputs_refuses_other_batches() -> None:
    """FedRobust needs pairs of tensors, and the message names the type that came."""
    algorithm = fl.build("fedrobust")
    model, batches = model_and_batches(1)
    context = fl.ClientContext(None, algorithm.client_init(fl.read_state(model).trainable))
    with pytest.raises(fl.AlgorithmError, match="pairs of tensors.*type dict"):
        fl.answer(
            model, fl.LocalData(batches, batches, masked, forward), fl.Work(algorithm, context, fl.LocalSettings(0.1))
        )


def test_an_empty_batch_of_any_structure_is_refused() -> None:
    """A dict batch of no example, as a pair of none."""
    model, (batch,) = model_and_batches(1)
    none = {name: tensor[:0] for name, tensor in batch.items()}
    with pytest.raises(ValueError, match="got a batch of none"):
        fl.train_locally(model, [none], masked, fl.LocalRule(), fl.LocalSettings(0.1), fl.LocalOptions(forward=forward))


def test_batches_of_a_full_gradient_are_not_kept() -> None:
    """Each batch of the whole local set is freed before the next but one is made."""
    algorithm = fl.build("mimelite")
    model, batches = model_and_batches(4)
    seen: list[int] = []

    def stream() -> Any:
        for number, batch in enumerate(batches):
            yield batch
            seen.append(number)

    x = fl.read_state(model).trainable
    work = fl.Work(algorithm, fl.ClientContext(x, {}), fl.LocalSettings(0.1))
    steps: list[list[int]] = []
    update = fl.answer(
        model, fl.LocalData(batches, stream(), masked, forward), work, lambda step: steps.append([*seen])
    )
    assert steps[:3] == [[], [0], [0, 1]]
    assert (len(steps), update.steps) == (8, 4)
