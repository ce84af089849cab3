"""Arithmetic over named tensors."""

import pytest
import torch

from algorithms import tree


def one(value):
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
def test_operations_by_hand(result, expected):
    """Each operation on numbers small enough to check by eye."""
    assert result["w"].item() == expected


def test_norm_is_over_all_tensors():
    """Entries 2, 3 and 6 in two tensors: sqrt(4 + 9 + 36) = 7."""
    assert tree.norm({"a": torch.tensor([2.0, 3.0]), "b": torch.tensor([[6.0]])}).item() == 7.0


def test_operands_are_matched_by_name():
    """Another order of names in the second operand changes nothing."""
    a = {"v": torch.tensor(1.0), "w": torch.tensor(2.0)}
    b = {"w": torch.tensor(20.0), "v": torch.tensor(10.0)}
    assert {name: value.item() for name, value in tree.add(a, b).items()} == {"v": 11.0, "w": 22.0}


def test_adding_in_place_writes_into_the_first_operand_only():
    """a <- 1 + 3 * 2 = 7, with b = 2 as it was."""
    a, b = one(1.0), one(2.0)
    tree.add_(a, b, 3.0)
    assert (a["w"].item(), b["w"].item()) == (7.0, 2.0)
