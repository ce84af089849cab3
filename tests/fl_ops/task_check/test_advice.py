"""Usual errors of the installed torch get their advice: a later version may word them otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fl_ops.task_check.advice import advice_on
from fl_ops.task_check.checks import explained

FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "sizes": (lambda: nn.Linear(5, 3)(torch.ones(8, 4)), "expects 5 numbers for each example and gets 4"),
    "classes": (lambda: functional.cross_entropy(torch.ones(1, 2), torch.tensor([2])), "a label is 2"),
    "float labels": (lambda: functional.cross_entropy(torch.ones(1, 2), torch.ones(1)), "targets with .long()"),
    "whole inputs": (lambda: nn.Linear(4, 3)(torch.ones(8, 4, dtype=torch.int64)), "convert them with .float()"),
    "double inputs": (lambda: nn.Linear(4, 3)(torch.ones(8, 4, dtype=torch.float64)), "convert them with .float()"),
    "one example": (lambda: nn.BatchNorm1d(3)(torch.ones(1, 3)), "use GroupNorm"),
    "channels": (lambda: nn.Conv2d(3, 4, 3)(torch.ones(1, 1, 8, 8)), "expects 3 channels and gets 1"),
    "unequal": (lambda: torch.stack([torch.ones(2), torch.ones(3)]), "examples of unequal size"),
    "nothing": (lambda: torch.stack([]), "for an empty shard"),
    "token": (lambda: nn.Embedding(4, 2)(torch.tensor([4])), "enlarge nn.Embedding"),
    "frozen": (lambda: torch.ones(1).sum().backward(), "set requires_grad on a parameter"),
    "no folder": (lambda: None / "x", "the shard has no folder"),  # type: ignore[operator] # as a task would
}
"""What a task does, and a part of the advice."""


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_of_torch_is_explained(name: str) -> None:
    """The error's own text, one full stop, and what to do."""
    act, advice = FAULTS[name]
    with pytest.raises((RuntimeError, ValueError, IndexError, TypeError)) as raised:
        act()
    text = explained(raised.value)
    assert text.startswith(f"{type(raised.value).__name__}: ")
    assert ".. This" not in text
    assert advice in text.partition(". This means: ")[2]


def test_another_error_has_no_advice() -> None:
    """Its text is all there is."""
    assert advice_on("the camera is unplugged") == ""
    assert explained(OSError("the camera is unplugged")) == "OSError: the camera is unplugged"
