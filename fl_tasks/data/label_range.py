"""The labels that data may have if its task names its classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from algorithms.batches import Batch, is_pair
from fl_tasks.errors import TaskError

IGNORED = -100
"""The label that torch's losses leave out."""


@dataclass(frozen=True)
class LabelRange:
    """Checks that labels are numbers of these classes."""

    classes: tuple[str, ...]
    what: str
    """The data in words, for errors."""

    def check(self, targets: Tensor) -> None:
        """Raises TaskError for class numbers out of range. Targets [n, k] of a floating type are probabilities."""
        classes = self.classes
        if targets.is_floating_point():
            if targets.dim() == 1 and len(targets):
                came = f"got {targets.dtype}: convert them with .long()"
                raise TaskError(f"{self.what}: expected class numbers as labels, {came}")
            return
        wrong = ((targets < 0) | (targets >= len(classes))) & (targets != IGNORED)
        if count := int(wrong.sum()):
            place = int(wrong.flatten(1).any(dim=1).nonzero()[0]) if wrong.dim() > 1 else int(wrong.nonzero()[0])
            raise TaskError(
                f"{self.what}: expected labels of 0 to {len(classes) - 1} ({shown(classes)}), got {count} others, as"
                f" {int(targets[wrong][0])} of example {place}"
            )

    def checked(self, batch: Batch) -> Batch:
        """The same batch, whose targets are checked if it is a pair (inputs, targets) in the CPU's memory.

        Which part of another batch is the label is not known. A check on an accelerator would wait for it in each step.
        """
        if is_pair(batch) and batch[1].device.type == "cpu" and batch[1].dim():
            self.check(batch[1])
        return batch


def shown(names: Sequence[object], most: int = 8) -> str:
    """The first names of a list, and how many more there are."""
    listed = ", ".join(str(name)[:40] for name in names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed
