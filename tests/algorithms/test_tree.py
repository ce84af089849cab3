"""Arithmetic over named tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import algorithms as fl
from algorithms import tree


def one(value: float) -> fl.Tensors:
    """One named number."""
    return {"w": torch.tensor([value], dtype=torch.float64)}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (tree.add(one(1.0), one(2.0)), 3.0),
        (tree.add(one(1.0), one(2.0), -0.5), 0.0),
        (tree.subtract(one(1.0), one(2.0)), -1.0),
        (tree.scale(one(3.0), 0.5), 1.5),
        (tree.scale(one(3.0), torch.tensor(0.5, dtype=torch.float64)), 1.5),
        (tree.lerp(one(1.0), one(5.0), 0.25), 2.0),
        (tree.full_like(one(1.0), 7.0), 7.0),
        (tree.map(torch.maximum, one(1.0), one(2.0)), 2.0),
    ],
    ids=["add", "add scaled", "subtract", "scale", "scale by tensor", "lerp", "full_like", "map"],
)
def test_operations_by_hand(result: fl.Tensors, expected: float) -> None:
    """Each operation on numbers small enough to check by eye."""
    assert result["w"].item() == expected


def test_norm_is_over_all_tensors() -> None:
    """Entries 2, 3 and 6 in two tensors: sqrt(4 + 9 + 36) = 7."""
    assert tree.norm({"a": torch.tensor([2.0, 3.0]), "b": torch.tensor([[6.0]])}).item() == 7.0


def test_operands_are_matched_by_name() -> None:
    """Another order of names in the second operand changes nothing."""
    a = {"v": torch.tensor(1.0), "w": torch.tensor(2.0)}
    b = {"w": torch.tensor(20.0), "v": torch.tensor(10.0)}
    assert {name: value.item() for name, value in tree.add(a, b).items()} == {"v": 11.0, "w": 22.0}


def test_adding_in_place_writes_into_the_first_operand_only() -> None:
    """a <- 1 + 3 * 2 = 7, with b = 2 as it was."""
    a, b = one(1.0), one(2.0)
    tree.add_(a, b, 3.0)
    assert (a["w"].item(), b["w"].item()) == (7.0, 2.0)


@pytest.mark.parametrize("operand", [None, "a", "b"], ids=["memory of its own", "of the first", "of the second"])
@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b, into: tree.add(a, b, -0.3, into),
        tree.subtract,
        lambda a, b, into: tree.accumulate(b, 0.9, a, into),
        lambda a, b, into: tree.scale(a, 0.3, into),
        lambda a, b, into: tree.scale(a, tree.norm(b), into),
    ],
    ids=["add", "subtract", "accumulate", "scale", "scale by tensor"],
)
def test_results_in_given_memory_are_the_same_bit_for_bit(
    operation: Callable[[fl.Tensors, fl.Tensors, fl.Tensors | None], fl.Tensors], operand: str | None
) -> None:
    """The result is that memory, with any earlier content, also an operand."""
    random = torch.Generator().manual_seed(1)
    a, b = ({name: torch.randn(7, 5, generator=random) for name in "vw"} for _ in range(2))
    expected = operation(a, b, None)
    into = {"a": a, "b": b, None: tree.scratch(a)}[operand]
    assert into is not None
    result = operation(a, b, into)
    assert all(torch.equal(result[name], expected[name]) for name in "vw")
    assert all(result[name] is into[name] for name in "vw")


def test_without_given_memory_operands_stay() -> None:
    """A sum is a new tensor."""
    a = one(1.0)
    assert (tree.add(a, a)["w"].item(), a["w"].item()) == (2.0, 1.0)


def test_lerp_in_place_by_hand() -> None:
    """1 + 0.25 * (5 - 1) = 2; between equal numbers nothing moves for any weight."""
    a = one(1.0)
    tree.lerp_(a, one(5.0), 0.25)
    assert a["w"].item() == 2.0
    for weight in (0.1, 0.7):
        b = one(0.1)
        tree.lerp_(b, one(0.1), weight)
        assert torch.equal(b["w"], one(0.1)["w"])


def test_memory_is_allocated_when_written() -> None:
    """What no operation wrote to is not held."""
    scratch = tree.scratch({"v": torch.ones(2), **one(1.0)})
    tree.add(one(1.0), one(1.0), into=scratch)
    assert scratch is not None
    assert scratch.keys() == {"w"}
