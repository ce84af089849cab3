"""The daemon's end of a package's process: starts it, gives it work, checks what comes back, and ends it.

For the rest of the daemon it is a trainer like that of an installed task. What the process says is data from outside:
sizes, layouts and digests are checked before they are used, and a process that ends, or sends anything else, costs the
work under way alone. The next work starts it again.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import structlog
import torch
from google.protobuf.message import DecodeError

from algorithms.base import Memory
from fl_client.connection.bundles.expected import Bundle, Layouts, ResourceKey
from fl_client.errors import StateError, WorkFailed
from fl_client.packages.process import Closed, Part, flat, key_text, nested, packed, receive, send, unpacked
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
from protos.codec import Layout, LayoutError, pack
from protos.digests import digest_bytes, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2

log = structlog.get_logger()

LEFT_S = 5.0
"""Seconds that work which nobody waits for may go on; then its process is ended."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A package that may be used, and the task of the settings that it is for."""

    digest: str
    title: str
    """For messages: name, version, digest, signer."""
    folder: Path
    """The folder with its modules."""
    number: int
    """The number of the task in the settings."""


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
        self._config, self.package = config, package
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._asked = 0
        """The number of requests, by which one that was left is known."""
        offer = self._start()
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

    @property
    def local(self) -> LocalTask:
        """The task with the numbers of its data, for the registration."""
        return self._local

    def layouts(self, assignment: AnyAssignment) -> Layouts:
        """See Trainer."""
        if (known := self.known_layouts(assignment)) is None:
            header, _ = self._ask("layouts", assignment)
            with _from_process():
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
        header, parts = self._ask("train", assignment, bundles, client_state, on_step)
        with _from_process():
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
        header, _ = self._ask("evaluate", assignment, bundles, client_state)
        with _from_process():
            sums, without = ([_sum(it) for it in header[name]] for name in ("sums", "sums_without_personal"))
            means = (_numbers(header["metrics"]), _numbers(header["without_personal"]))
            return Evaluation(int(header["examples"]), *means, sums, without)

    def measure_received(
        self,
        assignment: training_pb2.Assignment,
        bundles: Mapping[ResourceKey, Bundle],
        client_state: Memory | None,
    ) -> Measured:
        """See Trainer."""
        header, _ = self._ask("measure", assignment, bundles, client_state)
        with _from_process():
            return Measured(None, int(header["examples"]), _numbers(header["metrics"]))

    def check_private(self, assignment: training_pb2.Assignment) -> None:  # noqa: ARG002 - as Trainer
        """Raises WorkFailed: the code of a package would itself decide whether it adds the noise."""
        raise WorkFailed(
            pb.FAILURE_REASON_UNSUPPORTED,
            f"privacy: expected a task that is installed on the device, got that of {self.package.title}",
        )

    def leave(self) -> None:
        """Nobody waits for the work under way. End its process if it goes on for long."""
        asked = self._asked

        def end() -> None:
            if self._asked == asked:
                self.close()

        timer = threading.Timer(LEFT_S, end)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> pb.TaskOffer:
        ours, its = socket.socketpair()
        limits = self._config.packages
        path = self.package.folder.with_suffix(".log")
        with its, path.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, with a module of ours
                [sys.executable, "-P", "-m", "fl_client.packages.process", str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self._connection = ours
        order = {
            "config": self._config.model_dump(mode="json"), "folder": str(self.package.folder.absolute()),
            "number": self.package.number, "memory_bytes": limits.memory_mib << 20,
            "file_bytes": limits.file_mib << 20, "open_files": limits.open_files,
        }  # fmt: skip
        try:
            ours.settimeout(limits.start_s)
            send(ours, order)
            header, _ = receive(ours)
            ours.settimeout(None)
            if "offer" not in header:
                raise Closed(str(header.get("failed", "no offer"))[:1000])
            return pb.TaskOffer.FromString(bytes.fromhex(header["offer"]))
        except (Closed, OSError, ValueError, TypeError, DecodeError) as error:
            code = self._ended()
            raise StateError(
                f"{self.package.title} cannot be loaded ({code}; its output is in {path}): {error}"
            ) from None

    def _ended(self) -> str:
        """End the process. Returns how it ended."""
        process = self._process
        code = None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(1.0)
        self.close()
        if code is None:
            return "it was ended"
        return f"it ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"

    def _ask(  # noqa: PLR0913, PLR0917 - what the process needs
        self,
        what: str,
        assignment: AnyAssignment,
        bundles: Mapping[ResourceKey, Bundle] | None = None,
        state: Memory | None = None,
        on_step: OnStep | None = None,
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """The reply of the process, which is started if it has ended. Raises WorkFailed."""
        self._asked += 1
        if self._connection is None:
            try:
                self._start()
            except StateError as error:
                raise WorkFailed(pb.FAILURE_REASON_TASK_ERROR, str(error)) from None
        listed, parts = _packed_all(bundles or {}, state)
        text, training = assignment.SerializeToString().hex(), isinstance(assignment, training_pb2.Assignment)
        connection, most = cast(socket.socket, self._connection), 4 * self._config.max_bundle_bytes
        try:
            send(connection, {"do": what, "assignment": text, "training": training, "parts": listed}, parts)
            while True:
                header, results = receive(connection, most)
                if "step" not in header:
                    break
                self._step(connection, header["step"], on_step)
        except (Closed, OSError) as error:
            raise WorkFailed(
                pb.FAILURE_REASON_TASK_ERROR,
                f"the process of {self.package.title} has ended ({self._ended()}), {error}; it may take"
                f" {self._config.packages.memory_mib} MiB (packages.memory_mib), and start no other process",
            ) from None
        finally:
            self._asked += 1  # a timer that waits for this work ends no later one, and no idle process
        if "failed" in header:
            known = header.get("reason") in pb.FailureReason.values()
            reason = cast(pb.FailureReason, header["reason"]) if known else pb.FAILURE_REASON_TASK_ERROR
            raise WorkFailed(reason, str(header["failed"])[:4000])
        return header, results

    def _step(self, connection: socket.socket, at: Sequence[int], on_step: OnStep | None) -> None:
        try:
            with _from_process():
                step, steps = int(at[0]), int(at[1])
            if on_step is not None:
                on_step(step, steps)
        except BaseException:  # the work is not wanted any more: the process stops it, and says so
            with suppress(Closed, OSError):
                send(connection, {"stop": True})
                receive(connection)
            raise
        send(connection, {"stop": False})


class _from_process:  # noqa: N801 - used as a function
    """Turns what is wrong with a reply into a failure of the work."""

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, KeyError | ValueError | TypeError | IndexError | DecodeError | LayoutError):
            message = f"expected a reply of the package's process as it is agreed, got {type(error).__name__}: {error}"
            raise WorkFailed(pb.FAILURE_REASON_TASK_ERROR, message[:1000]) from None


def _packed_all(
    bundles: Mapping[ResourceKey, Bundle], state: Memory | None
) -> tuple[list[tuple[list[Any], str]], list[Part]]:
    """What the process gets beside the assignment: (key, manifest) of each part, and the parts."""
    listed: list[tuple[list[Any], str]] = [(key_text(key), "") for key in bundles]
    parts = [packed_as(bundle) for bundle in bundles.values()]
    if state is not None:
        manifest, data = packed(flat(state))
        listed.append(([0, ""], manifest))
        parts.append(data)
    return listed, parts


def packed_as(bundle: Bundle) -> Part:
    """The bytes of a bundle in its layout."""
    return pack(bundle.tensors, bundle.layout)


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
