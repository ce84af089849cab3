"""The part of a client's own shard that it keeps from training, for evaluation on the clients."""

from __future__ import annotations

import torch

from tasks.base import Examples, TaskError


def split_shard(examples: Examples, fraction: float) -> tuple[Examples, Examples]:
    """(training part, held-out part) of a shard; held out are floor(fraction * n) examples, without augmentation.

    They lie evenly spread over the shard as it is ordered, so that a shard sorted by class gives some of each class,
    and a shard is always cut the same way. Raises TaskError for a fraction outside [0, 1).
    """
    count = int(checked_fraction(fraction) * len(examples))
    evaluation = torch.arange(count) * len(examples) // max(count, 1)
    held_out = Examples(examples.inputs[evaluation], examples.targets[evaluation])
    if not count:
        return examples, held_out
    trained = torch.ones(len(examples), dtype=torch.bool)
    trained[evaluation] = False
    return examples[trained], held_out


def checked_fraction(fraction: float) -> float:
    """The option client_eval_fraction, if it is in [0, 1); else TaskError."""
    if not 0 <= fraction < 1:
        raise TaskError(f"expected client_eval_fraction from 0 to below 1, got {fraction}")
    return fraction
