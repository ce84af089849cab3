"""Splits a client's shard into a training part and a held-out part for evaluation on clients."""

from __future__ import annotations

from dataclasses import replace

import torch

from fl_tasks.base import Examples, TaskError


def split_shard(examples: Examples, fraction: float) -> tuple[Examples, Examples]:
    """(training part, held-out part) of a shard. floor(fraction * n) examples are held out, without augmentation.

    They are evenly spaced in the shard's order, so that a shard sorted by class yields some of each class, and the
    split is always the same. Raises TaskError for a fraction outside [0, 1).
    """
    count = int(checked_fraction(fraction) * len(examples))
    evaluation = torch.arange(count) * len(examples) // max(count, 1)
    held_out = replace(examples[evaluation], augment=None)
    if not count:
        return examples, held_out
    trained = torch.ones(len(examples), dtype=torch.bool)
    trained[evaluation] = False
    return examples[trained], held_out


def checked_fraction(fraction: float) -> float:
    """Return the option client_eval_fraction. Raises TaskError unless it is in [0, 1)."""
    if not 0 <= fraction < 1:
        raise TaskError(f"expected client_eval_fraction from 0 to below 1, got {fraction}")
    return fraction
