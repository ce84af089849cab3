"""Compares the header of an update with the work that its client was assigned.

Weights follow from examples, and steps normalise deltas (FedNova, FedCM, SCAFFOLD): a client that could report any
number would choose its own weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fl_server.clients.eligibility import offers_task
from fl_server.local_config import LocalSection
from fl_server.store.records import ClientRecord
from protos.fl.v1.training_pb2 import UpdateHeader
from tasks.batches import count_steps


@dataclass(frozen=True, slots=True)
class ExpectedWork:
    """The work of one client in one exchange."""

    examples: int
    """Examples that the client registered for the task."""
    local: LocalSection
    trains: bool
    """Whether the exchange trains. Nothing in a full gradient depends on the number of batches."""

    def difference(self, header: UpdateHeader) -> str:
        """The contradiction between header and work; empty if there is none."""
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
        """K_i, the local steps of a client with this number of examples."""
        epochs = None if self.local.steps else self.local.epochs or 1
        return count_steps(examples, self.local.batch_size, epochs=epochs, steps=self.local.steps)


def registered_examples(record: ClientRecord | None, task: Mapping[str, str]) -> int:
    """Examples that a client registered for a task of that name, version and source; 0 if it has none."""
    offers = record.tasks if record is not None else ()
    return max((int(offer["train_examples"]) for offer in offers if offers_task(offer, task)), default=0)
