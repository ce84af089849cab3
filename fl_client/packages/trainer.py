"""A trainer whose task is in the process of a package: for the rest of the daemon it is one as any other.

What the process says is data from outside: sizes, layouts and digests are checked before they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from algorithms.base import Memory
from fl_client.connection.bundles.expected import Bundle, Layouts, ResourceKey
from fl_client.errors import unsupported
from fl_client.packages.child import Child, Installed, from_process
from fl_client.packages.process import nested, unpacked
from fl_client.settings.config import ClientConfig
from fl_client.storage.client_state_store import NextState
from fl_client.storage.pending_updates import Update, work_digest
from fl_client.training.data import LocalTask
from fl_client.training.own_loop import OnStep
from fl_client.training.private import PrivateWork
from fl_client.training.results import Evaluation, TrainingResult
from fl_client.training.trainer import AnyAssignment, Trainer
from fl_common.secure_aggregation.scalars import Measured
from fl_tasks.data.forms import Data
from protos.codec import Layout
from protos.digests import digest_bytes, digest_of
from protos.fl.v1 import tensor_pb2, training_pb2


class _Counted:
    """The data in the process, of which the daemon knows the numbers alone."""

    def __init__(self, examples: int, own_batches: int) -> None:
        self._examples, self.own_batches = examples, own_batches

    def __len__(self) -> int:
        return self._examples


class PackageTrainer(Trainer):
    """A trainer whose task and data are in a process of their own."""

    def __init__(self, config: ClientConfig, package: Installed, device: torch.device) -> None:
        """Start the process, which loads the task and its data. Raises StateError with the reason if it cannot."""
        self.package, self._child = package, Child(config, package)
        offer = self._child.start()
        served = config.served[package.number]
        counted = cast(Data, _Counted(offer.train_examples, offer.train_batches))
        local = LocalTask(
            served.name,
            cast(Any, None),
            offer.fingerprint,
            counted,
            cast(Data, _Counted(offer.eval_examples, 0)),
            device,
            frozen=offer.frozen if offer.HasField("frozen") else None,
            data=served.data,
            labels=served.labels,
            package=package.digest,
        )
        super().__init__(local)

    def layouts(self, assignment: AnyAssignment) -> Layouts:
        """See Trainer."""
        if (known := self.known_layouts(assignment)) is None:
            header, _ = self._child.ask("layouts", assignment)
            with from_process():
                known = {_kind(kind): _layout(text) for kind, text in header["layouts"]}
            personal, own_frozen = tuple(assignment.personal), assignment.HasField("local_frozen")
            self._layouts = {(personal, own_frozen): known}
        return known

    def train(  # noqa: PLR0913, PLR0917 - as Trainer
        self,
        assignment: training_pb2.Assignment,
        bundles: Mapping[ResourceKey, Bundle],
        client_state: Memory | None,
        on_step: OnStep,
        private: PrivateWork | None = None,
    ) -> TrainingResult:
        """See Trainer."""
        self.check_task(assignment)
        if private is not None:
            self.check_private(assignment)
        header, parts = self._child.ask("train", assignment, bundles, client_state, on_step)
        with from_process():
            update = training_pb2.UpdateHeader.FromString(bytes.fromhex(header["header"]))
            data, *states = parts
            if update.key != assignment.key or update.size_bytes != len(data):
                raise ValueError("an update for other work")
            if digest_bytes(update.digest) != digest_of(data):
                raise ValueError("an update with another digest")
            update.ClearField("session_id")
            memories = [nested(unpacked(text, it)) for text, it in zip(header["states"], states, strict=True)]
            next_state = NextState(*memories) if memories else None
        return TrainingResult(Update(work_digest(assignment), update, (bytes(data),)), next_state)

    def evaluate(
        self,
        assignment: training_pb2.EvaluationAssignment,
        bundles: Mapping[ResourceKey, Bundle],
        client_state: Memory | None = None,
    ) -> Evaluation:
        """See Trainer."""
        self.check_task(assignment)
        header, _ = self._child.ask("evaluate", assignment, bundles, client_state)
        with from_process():
            sums, without = ([_sum(it) for it in header[name]] for name in ("sums", "sums_without_personal"))
            means = (_numbers(header["metrics"]), _numbers(header["without_personal"]))
            return Evaluation(int(header["examples"]), *means, sums, without)

    def measure_received(
        self, assignment: training_pb2.Assignment, bundles: Mapping[ResourceKey, Bundle], client_state: Memory | None
    ) -> Measured:
        """See Trainer."""
        header, _ = self._child.ask("measure", assignment, bundles, client_state)
        with from_process():
            return Measured(None, int(header["examples"]), _numbers(header["metrics"]))

    def check_private(self, assignment: training_pb2.Assignment) -> None:  # noqa: ARG002 - as Trainer
        """Raises WorkFailed: the code of a package would itself decide whether it adds the noise."""
        raise unsupported(f"privacy: expected a task that is installed on the device, got that of {self.package.title}")

    def leave(self) -> None:
        """See Child."""
        self._child.leave()

    def close(self) -> None:
        """End the process."""
        self._child.close()


def _kind(number: Any) -> Any:
    tensor_pb2.ResourceKind.Name(number)
    return number


def _layout(text: str) -> Layout:
    return Layout.from_manifest(tensor_pb2.Manifest.FromString(bytes.fromhex(text)), 1 << 50)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in metrics.items()}


def _sum(given: Sequence[Any]) -> Any:
    metric, name, shape, values = given
    return str(metric), str(name), tuple(map(int, shape)), [float(value) for value in values]
