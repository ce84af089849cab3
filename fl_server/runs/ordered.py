"""What a client was told to do, and how far the header of its update can be held to it.

Weights are made from examples, and steps normalise deltas (FedNova, FedCM, SCAFFOLD): who could say any number would
choose its own weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fl_server.registration import is_of
from fl_server.run_config import LocalSection
from fl_server.store.base import ClientRecord
from protos.fl.v1.training_pb2 import UpdateHeader
from tasks.batches import count_steps


@dataclass(frozen=True, slots=True)
class Ordered:
    """The work of one client in one exchange."""

    examples: int
    """That it registered for the task."""
    local: LocalSection
    trains: bool
    """Whether steps are made; of a full gradient nothing depends on the number of batches."""

    def difference(self, header: UpdateHeader) -> str:
        """What the header says that cannot be, in words; empty if it fits."""
        if header.num_examples > self.examples:
            return (
                f"expected {self.examples} examples at most, as the client registered for the task, "
                f"got {header.num_examples}"
            )
        steps = self.steps(header.num_examples)
        if self.trains and header.num_steps != steps:
            return f"expected {steps} steps, as ordered for {header.num_examples} examples, got {header.num_steps}"
        return ""

    def steps(self, examples: int) -> int:
        """K_i for a client with so many examples."""
        epochs = None if self.local.steps else self.local.epochs or 1
        return count_steps(examples, self.local.batch_size, epochs=epochs, steps=self.local.steps)


def registered_examples(record: ClientRecord | None, task: Mapping[str, str]) -> int:
    """What a client registered to have for a task of that name, version and source; 0 if it does not offer it."""
    offers = record.tasks if record is not None else ()
    return max((int(offer["train_examples"]) for offer in offers if is_of(offer, task)), default=0)
